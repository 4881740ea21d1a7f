"""Owns CIFAR-10, binary version: 60,000 images of 32 x 32 pixels in ten classes.

A file is a row of records. A record is one byte for the label, then 1,024 bytes each of red, green and blue.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.data.archive import DataFile, DataSource, reason
from offbeat.data.cache import ready, unusable

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
CLASSES = 10

BATCH = 30_730_000  # 10,000 records, as https://www.cs.toronto.edu/~kriz/cifar.html says

# Archive: the page publishes its MD5, c32a1d4ab5d03f1284b67883e8d87530. The SHA-256 of the same file is in ankane's
# torchvision-ruby (lib/torchvision/datasets/cifar10.rb) and in gomlx (examples/cifar), where they agree.
# Members: torchvision-ruby, same file. The same six files have the SHA-1 that Apache MXNet publishes
# (python/mxnet/gluon/data/vision/datasets.py); both were compared with real data.
SOURCE = DataSource(
    title="CIFAR-10",
    archive="cifar-10-binary.tar.gz",
    size=170_052_171,
    digest="sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    official=("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
    variable="OFFBEAT_CIFAR10_URL",
    folder="cifar-10-batches-bin",
    files=(
        DataFile("data_batch_1.bin", BATCH, "sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5"),
        DataFile("data_batch_2.bin", BATCH, "sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed"),
        DataFile("data_batch_3.bin", BATCH, "sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67"),
        DataFile("data_batch_4.bin", BATCH, "sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48"),
        DataFile("data_batch_5.bin", BATCH, "sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add"),
        DataFile("test_batch.bin", BATCH, "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"),
    ),
)

Pixels = npt.NDArray[np.uint8]
Labels = npt.NDArray[np.int64]


class Images(NamedTuple):
    """Images as [number, colour, row, column] with their classes, 0 to 9, in the order of the files."""

    train_images: Pixels
    train_labels: Labels
    test_images: Pixels
    test_labels: Labels


def cifar10(folder: Path | None = None) -> Images:
    """CIFAR-10 from `folder`, or from the cache folder; fetched there the first time."""
    place = ready(SOURCE, folder)
    return Images(*_read(place, SOURCE.files[:-1]), *_read(place, SOURCE.files[-1:]))


def _read(place: Path, files: Sequence[DataFile]) -> tuple[Pixels, Labels]:
    """Each file is copied to its rows, because labels stand between the pixels."""
    count = sum(file.size for file in files) // (1 + PIXELS)
    images, labels = np.empty((count, PIXELS), np.uint8), np.empty(count, np.int64)
    start = 0
    for file in files:
        records = _records(place / file.name, file.size)
        end = start + len(records)
        images[start:end], labels[start:end] = records[:, 1:], records[:, 0]
        start = end
    return images.reshape(count, *SHAPE), labels


def _records(path: Path, size: int) -> Pixels:
    try:
        content = np.fromfile(path, np.uint8)
    except OSError as error:
        raise unusable(SOURCE, path, reason(error)) from error
    if content.size != size:
        raise unusable(SOURCE, path, f"{content.size:,} of {size:,} bytes could be read")
    records = content.reshape(-1, 1 + PIXELS)
    wrong = np.flatnonzero(records[:, 0] >= CLASSES)
    if wrong.size:
        label = records[wrong[0], 0]
        raise unusable(SOURCE, path, f"record {wrong[0]} has label {label}, and labels are 0 to {CLASSES - 1}")
    return records
