"""Owns WikiText-2, word level: two million words of English Wikipedia, as numbers.

Rules kept here:
- A line is split on white space and ends with <eos>, empty lines too. Nothing stands before its first word.
- The vocabulary comes from train, most frequent words first; words as frequent as one another stand in the order of
  their characters. So it does not depend on the order of the articles.
- A word that is not in the vocabulary is <unk>, which is a word of train.
"""

from collections import Counter
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from offbeat.data.archive import DataFile, DataSource, reason
from offbeat.data.cache import ready, unusable
from offbeat.errors import InvalidValue

UNKNOWN, END = "<unk>", "<eos>"

# Addresses: S3's is the official one, but has refused everyone since 2024 (pytorch/text issues 2247 and 2255). The data
# set's first author is reported to serve the same archives (IST-DASLab/Quartet pull request 11), but not to clients
# that call themselves Python.
# Archive: SHA-256 in Apple's mlx-data (python/mlx/data/datasets/wikitext.py); size in gluon-nlp
# (scripts/datasets/url_checksums/language_model.txt). Its MD5 in torchtext is 542ccefacc6c27f945fb54453812b3cd, its
# SHA-1 in gluon-nlp 3c914d17d80b1459be871a5039ac23e752a53cbe.
# Members: SHA-1 in gluon-nlp (src/gluonnlp/data/corpora/wikitext.py). Sizes: measured; valid and test have that SHA-1.
SOURCE = DataSource(
    title="WikiText-2",
    archive="wikitext-2-v1.zip",
    size=4_475_746,
    digest="sha256:92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
    official=(
        "https://wikitext.smerity.com/wikitext-2-v1.zip",
        "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
    ),
    variable="OFFBEAT_WIKITEXT2_URL",
    folder="wikitext-2",
    files=(
        DataFile("wiki.train.tokens", 10_797_148, "sha1:863f29c46ef9d167fff4940ec821195882fe29d1"),
        DataFile("wiki.valid.tokens", 1_121_681, "sha1:0418625c8b4da6e4b5c7a0b9e78d4ae8f7ee5422"),
        DataFile("wiki.test.tokens", 1_256_449, "sha1:c7b8ce0aa086fb34dab808c5c49224211eb2b172"),
    ),
)

Tokens = npt.NDArray[np.int32]


class Text(NamedTuple):
    """Token k stands for the word `vocabulary[k]`."""

    train: Tokens
    valid: Tokens
    test: Tokens
    vocabulary: tuple[str, ...]


def wikitext2(folder: Path | None = None, *, vocabulary: int | None = None) -> Text:
    """WikiText-2 from `folder`, or from the cache folder; `vocabulary` keeps that many words, the most frequent."""
    if vocabulary is not None and vocabulary < 2:
        raise InvalidValue(f"vocabulary is {vocabulary}; give at least 2, which are {UNKNOWN} and {END}")
    place = ready(SOURCE, folder)
    train, valid, test = (_words(place / file.name) for file in SOURCE.files)
    counts = Counter(train)
    if UNKNOWN not in counts:
        raise unusable(SOURCE, place / SOURCE.files[0].name, f"it has no {UNKNOWN}, so it is not the word level")
    kept = most_frequent(counts, vocabulary)
    return Text(_tokens(train, kept), _tokens(valid, kept), _tokens(test, kept), kept)


def most_frequent(counts: Counter[str], size: int | None) -> tuple[str, ...]:
    """The words of a vocabulary in its order; <unk> and <eos> are always among them.

    >>> most_frequent(Counter({"the": 5, "sea": 2, "gull": 2, "<eos>": 1, "<unk>": 1}), 4)
    ('the', 'gull', '<eos>', '<unk>')
    """
    ordered = sorted(counts, key=lambda word: (-counts[word], word))
    if size is None:
        return tuple(ordered)
    others = [word for word in ordered if word not in (UNKNOWN, END)]
    kept = {UNKNOWN, END, *others[: size - 2]}
    return tuple(word for word in ordered if word in kept)


def _words(path: Path) -> list[str]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise unusable(SOURCE, path, reason(error)) from error
    except UnicodeDecodeError as error:
        raise unusable(SOURCE, path, f"it is not UTF-8 ({reason(error)} at byte {error.start:,})") from error
    if text and not text.endswith("\n"):
        text += "\n"
    return text.replace("\n", f" {END} ").split()


def _tokens(words: list[str], vocabulary: tuple[str, ...]) -> Tokens:
    number = {word: k for k, word in enumerate(vocabulary)}
    return np.fromiter(map(number.get, words, repeat(number[UNKNOWN])), np.int32, len(words))
