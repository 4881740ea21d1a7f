"""WikiText-2: the same words come back out of the tokens, and the vocabulary is what its rules say."""

import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.data import Text, text, wikitext2
from offbeat.errors import InvalidValue, OffbeatError
from tests.unit.test_data_archives import source_of, zipped

NAMES = ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens")
REAL = Path(os.environ.get("OFFBEAT_DATA") or "not set")
NEEDS_REAL = pytest.mark.skipif(
    not (REAL / "wikitext-2").is_dir(), reason="set OFFBEAT_DATA to a folder that holds wikitext-2"
)
WORDS = st.sampled_from(["the", "sea", "gull", "=", "<unk>", "@-@", "é", "\u4e2d"])
LINES = st.lists(st.tuples(st.lists(WORDS, max_size=6), st.sampled_from([" ", "  ", " \t"])), max_size=6)
FILE = LINES.map(lambda lines: "".join(f" {gap.join(words)} \n" for words, gap in lines))


def read(train: str, valid: str = "", test: str = "", vocabulary: int | None = None) -> Text:
    """What the loader makes of a zip archive with these three texts."""
    contents = dict(zip(NAMES, (each.encode() for each in (train, valid, test)), strict=True))
    packed = zipped({f"set/{name}": content for name, content in contents.items()})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / "set.zip").write_bytes(packed)
        patch.setattr(text, "SOURCE", source_of(packed, contents, "set.zip"))
        return wikitext2(Path(folder), vocabulary=vocabulary)


def by_line(content: str) -> list[str]:
    """The rule, word for word."""
    lines = content.split("\n")
    if lines[-1] == "":
        lines.pop()
    return [word for line in lines for word in (*line.split(), "<eos>")]


def words(tokens: text.Tokens, found: Text) -> list[str]:
    return [found.vocabulary[token] for token in tokens]


def test_lines_end_with_eos_and_empty_ones_are_kept() -> None:
    found = read(" \n = Sea = \n\n the <unk> sea \n", " the gull \n", "sea")
    assert words(found.train, found) == ["<eos>", "=", "Sea", "=", "<eos>", "<eos>", "the", "<unk>", "sea", "<eos>"]
    assert words(found.valid, found) == ["the", "<unk>", "<eos>"]
    assert words(found.test, found) == ["sea", "<eos>"]
    assert {tokens.dtype for tokens in found[:3]} == {np.dtype(np.int32)}


def test_frequent_words_come_first_and_equals_in_the_order_of_their_characters() -> None:
    found = read("b b a a c <unk> Z \n d\n")
    assert found.vocabulary == ("<eos>", "a", "b", "<unk>", "Z", "c", "d")
    again = read("d\nZ <unk> c a b a b\n")  # the same lines, in another order
    assert again.vocabulary == found.vocabulary


@settings(derandomize=True, deadline=None, max_examples=80)
@given(FILE, FILE, FILE, st.one_of(st.none(), st.integers(2, 12)))
def test_tokens_are_the_words_by_the_rules(train: str, valid: str, test: str, size: int | None) -> None:
    train += " <unk> \n"
    found = read(train, valid, test, size)
    counts = Counter(by_line(train))
    vocabulary = found.vocabulary
    assert {"<unk>", "<eos>"} <= set(vocabulary) <= set(counts)
    assert len(vocabulary) == len(set(vocabulary)) == min(size or len(counts), len(counts))
    assert sorted(vocabulary, key=lambda word: (-counts[word], word)) == list(vocabulary)
    dropped = set(counts) - set(vocabulary)
    kept = set(vocabulary) - {"<unk>", "<eos>"}
    assert max((counts[word] for word in dropped), default=0) <= min((counts[word] for word in kept), default=99)
    for tokens, content in zip(found[:3], (train, valid, test), strict=True):
        expected = [word if word in vocabulary else "<unk>" for word in by_line(content)]
        assert words(tokens, found) == expected


def test_a_smaller_vocabulary_keeps_the_most_frequent_words() -> None:
    train = "the the the sea sea gull <unk>\n"
    assert read(train, vocabulary=4).vocabulary == ("the", "sea", "<eos>", "<unk>")
    assert read(train, vocabulary=2).vocabulary == ("<eos>", "<unk>")
    assert read(train, vocabulary=99).vocabulary == read(train).vocabulary
    found = read(train, "gull sea", vocabulary=4)
    assert words(found.valid, found) == ["<unk>", "sea", "<eos>"]
    for size in (1, 0, -3):
        with pytest.raises(InvalidValue, match=f"vocabulary is {size}; give at least 2"):
            read(train, vocabulary=size)


def test_what_is_not_the_word_level_is_refused() -> None:
    with pytest.raises(OffbeatError, match=r"wiki\.train\.tokens: it has no <unk>, so it is not the word level"):
        read("the sea\n")


def test_what_is_not_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = dict.fromkeys(NAMES, b"<unk>\n") | {NAMES[1]: b"ab\xff\n"}
    monkeypatch.setattr(text, "SOURCE", source_of(b"", contents))
    (tmp_path / "set").mkdir()
    for name, content in contents.items():
        (tmp_path / "set" / name).write_bytes(content)
    with pytest.raises(OffbeatError, match=r"wiki\.valid\.tokens: it is not UTF-8 \(invalid start byte at byte 2\)"):
        wikitext2(tmp_path)
    monkeypatch.setattr(text, "ready", lambda *_: tmp_path / "gone")
    with pytest.raises(OffbeatError, match=r"cannot use .*wiki\.train\.tokens: No such file"):
        wikitext2(tmp_path)


def test_the_official_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    source = text.SOURCE
    assert tuple(file.name for file in source.files) == NAMES
    assert len(source.digest) == len("sha256:") + 64
    assert all(len(file.digest) == len("sha1:") + 40 for file in source.files)
    assert all(address.endswith("/wikitext-2-v1.zip") for address in source.addresses())
    monkeypatch.setenv("OFFBEAT_WIKITEXT2_URL", "file:///mirror.zip")
    assert source.addresses() == ("file:///mirror.zip",)


@NEEDS_REAL
def test_the_real_text() -> None:
    found = wikitext2()
    assert [len(tokens) for tokens in found[:3]] == [2_088_628, 217_646, 245_569]
    assert len(found.vocabulary) == 33_278
    assert found.vocabulary[:5] == ("the", ",", ".", "of", "<unk>")
    end = found.vocabulary.index("<eos>")
    assert [int((tokens == end).sum()) for tokens in found[:3]] == [36_718, 3_760, 4_358]
    counts = np.bincount(found.train)
    assert (np.diff(counts) <= 0).all()
    small = wikitext2(vocabulary=10_000)
    assert small.vocabulary == found.vocabulary[:10_000]
    unknown = found.vocabulary.index("<unk>")
    assert np.array_equal(small.test, np.where(found.test < 10_000, found.test, unknown))
