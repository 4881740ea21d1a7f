"""Digests say their kind, and are checked with that kind."""

import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat import digests
from offbeat.digests import BLAKE3, SHA256, DigestUnknown, Hasher, chosen_digest, digest_of_file, holds, is_digest

EMPTY = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""BLAKE3 of nothing, as its specification has it."""
DATA = bytes(range(256)) * 5000


@pytest.fixture
def without_blake3(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "blake3", None)
    digests.known_digests.cache_clear()
    yield
    digests.known_digests.cache_clear()


def text(kind: str, *parts: bytes) -> str:
    hasher = Hasher(kind)
    for part in parts:
        hasher.update(part)
    return hasher.text()


def test_a_digest_says_its_kind() -> None:
    pytest.importorskip("blake3")
    assert text(BLAKE3) == f"blake3:{EMPTY}"
    assert text(SHA256, DATA[:7], DATA[7:]) == hashlib.sha256(DATA).hexdigest()
    assert text(BLAKE3, DATA[:7], DATA[7:]) == text(BLAKE3, DATA) != text(BLAKE3, DATA[:-1])


@pytest.mark.parametrize(
    ("written", "fits"),
    [
        ("ab" * 32, True),
        ("blake3:" + "ab" * 32, True),
        ("AB" * 32, False),
        ("ab" * 31, False),
        ("sha256:" + "ab" * 32, False),
        ("md5:" + "ab" * 32, False),
        ("blake3:" + "ab" * 33, False),
        ("ab" * 32 + "\n", False),
        ("", False),
    ],
)
def test_only_what_we_write_is_a_digest(written: str, fits: bool) -> None:
    assert is_digest(written) is fits


def test_a_file_is_checked_with_the_kind_of_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("blake3")
    file = tmp_path / "file"
    file.write_bytes(DATA)
    for kind in (SHA256, BLAKE3):
        assert digest_of_file(file, kind) == text(kind, DATA)
        assert holds(file, text(kind, DATA))
        assert not holds(file, text(kind, DATA[1:]))


def test_the_fastest_kind_that_both_ends_know_is_chosen() -> None:
    pytest.importorskip("blake3")
    assert chosen_digest(["sha256", "blake3"]) == BLAKE3
    assert chosen_digest(["sha256", "md5"]) == SHA256
    assert chosen_digest([]) == SHA256


@pytest.mark.usefixtures("without_blake3")
def test_without_the_package_sha256_is_used_and_the_other_kind_says_what_to_install() -> None:
    assert digests.known_digests() == (SHA256,)
    assert chosen_digest(["blake3", "sha256"]) == SHA256
    with pytest.raises(DigestUnknown, match=r"BLAKE3 digests, whose package is not installed; pip install"):
        Hasher(BLAKE3)
