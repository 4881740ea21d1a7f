"""CIFAR-10: every record in its row, colours in their planes, and no image with a label that is no class."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offbeat.data import Images, cifar10, images
from offbeat.data.cache import ready
from offbeat.errors import OffbeatError
from tests.unit.test_data_archives import source_of, tarred

COUNTS = {"data_batch_1.bin": 3, "data_batch_2.bin": 2, "test_batch.bin": 4}
REAL = Path(os.environ.get("OFFBEAT_DATA") or "not set")
NEEDS_REAL = pytest.mark.skipif(
    not (REAL / "cifar-10-batches-bin").is_dir(),
    reason="set OFFBEAT_DATA to a folder that holds cifar-10-batches-bin",
)


def records(seed: int = 0) -> dict[str, images.Pixels]:
    """Files of a few random records, by name."""
    rng = np.random.default_rng(seed)
    files = {name: rng.integers(0, 256, (count, 3073), np.uint8) for name, count in COUNTS.items()}
    for each in files.values():
        each[:, 0] %= 10
    return files


def arrange(root: Path, files: dict[str, images.Pixels], patch: pytest.MonkeyPatch) -> None:
    """Put the archive of these files there, and expect it."""
    contents = {name: each.tobytes() for name, each in files.items()}
    packed = tarred({f"set/{name}": content for name, content in contents.items()})
    patch.setattr(images, "SOURCE", source_of(packed, contents))
    (root / "set.tar.gz").write_bytes(packed)


def test_every_record_is_in_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = records()
    arrange(tmp_path, files, monkeypatch)
    found = cifar10(tmp_path)
    assert isinstance(found, Images)
    train = np.concatenate([files["data_batch_1.bin"], files["data_batch_2.bin"]])
    for pixels, labels, expected in ((found[0], found[1], train), (found[2], found[3], files["test_batch.bin"])):
        assert (pixels.dtype.name, labels.dtype.name) == ("uint8", "int64")
        assert pixels.shape == (len(expected), 3, 32, 32)
        assert pixels.flags.c_contiguous
        assert labels.tolist() == expected[:, 0].tolist()
        assert pixels.reshape(len(expected), -1).tolist() == expected[:, 1:].tolist()
    row = files["data_batch_2.bin"][1]
    colour, y, x = 2, 5, 7
    assert found.train_images[4, colour, y, x] == row[1 + colour * 1024 + y * 32 + x]


def test_a_label_that_is_no_class_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = records()
    files["data_batch_2.bin"][1, 0] = 10
    arrange(tmp_path, files, monkeypatch)
    says = r"data_batch_2\.bin: record 1 has label 10, and labels are 0 to 9"
    with pytest.raises(OffbeatError, match=says):
        cifar10(tmp_path)
    files["data_batch_2.bin"][1, 0] = 9
    (tmp_path / "set" / "data_batch_2.bin").write_bytes(files["data_batch_2.bin"].tobytes())
    assert cifar10(tmp_path).train_labels[4] == 9


def test_a_file_that_shrinks_or_goes_after_the_check_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrange(tmp_path, records(), monkeypatch)
    place = ready(images.SOURCE, tmp_path)
    monkeypatch.setattr(images, "ready", lambda *_: place)
    with (place / "test_batch.bin").open("r+b") as file:
        file.truncate(3073)
    with pytest.raises(OffbeatError, match=r"test_batch\.bin: 3,073 of 12,292 bytes could be read"):
        cifar10(tmp_path)
    (place / "test_batch.bin").unlink()
    with pytest.raises(OffbeatError, match=r"cannot use .*test_batch\.bin: No such file"):
        cifar10(tmp_path)


def test_the_official_layout() -> None:
    source = images.SOURCE
    assert [file.name for file in source.files] == [f"data_batch_{k}.bin" for k in range(1, 6)] + ["test_batch.bin"]
    assert {file.size for file in source.files} == {10_000 * 3073}
    digests = [source.digest, *(file.digest for file in source.files)]
    assert {len(digest) for digest in digests} == {len("sha256:") + 64}
    assert source.addresses() == ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)


@NEEDS_REAL
def test_the_real_images() -> None:
    found = cifar10()
    assert found.train_images.shape == (50_000, 3, 32, 32)
    assert found.test_images.shape == (10_000, 3, 32, 32)
    assert np.bincount(found.train_labels).tolist() == [5000] * 10
    assert np.bincount(found.test_labels).tolist() == [1000] * 10
    means = found.train_images.mean((0, 2, 3)) / 255
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)  # of red, green and blue, as widely published


@NEEDS_REAL
def test_real_files_have_the_official_digests(tmp_path: Path) -> None:
    real = REAL / "cifar-10-batches-bin"
    names = [file.name for file in images.SOURCE.files]
    packed = tarred({f"cifar-10-batches-bin/{name}": (real / name).read_bytes() for name in names[-1:]})
    expected = source_of(packed, {}, "cifar-10-binary.tar.gz")
    (tmp_path / expected.archive).write_bytes(packed)
    official = replace(images.SOURCE, size=expected.size, digest=expected.digest, files=images.SOURCE.files[-1:])
    assert (ready(official, tmp_path) / "test_batch.bin").read_bytes() == (real / "test_batch.bin").read_bytes()
