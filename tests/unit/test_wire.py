"""Models on the wire: valid safetensors, bit for bit, and whatever strangers send is one known error."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from offbeat import wire
from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.wire import (
    UNLOADED_MIN,
    BadPayload,
    HeaderReader,
    body_of,
    header_of,
    mapped,
    read_header,
    unload,
    unpack,
)

SMAPS = Path("/proc/self/smaps")


def model() -> Model:
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {
        "weight": rng.standard_normal((3, 5)).astype(np.float32),
        "bias": np.array([np.nan, -0.0, np.inf], np.float32),
        "mean": rng.standard_normal(4).astype(np.float32),
        "count": np.array(7, np.int64),
        "mask": np.array([True, False]),
    }
    return Model.of(arrays, buffers=["mean", "count", "mask"])


def packed(of: Model, **metadata: str) -> bytes:
    return header_of(of.layout, metadata) + b"".join(body_of(of))


def same(a: Model, b: Model) -> bool:
    return a.vector.tobytes() == b.vector.tobytes() and all(
        np.array_equal(a.carried[n], b.carried[n]) for n in a.carried
    )


def test_any_safetensors_reader_reads_it() -> None:
    theirs = load(packed(model()))
    assert theirs.keys() == set(model())
    for name, array in model().items():
        assert theirs[name].dtype == array.dtype
        assert theirs[name].tobytes() == array.tobytes()


def test_the_vector_lies_in_it_as_it_is_and_on_a_boundary() -> None:
    of = model()
    data, header = packed(of, t="5"), read_header(packed(of, t="5"))
    assert header.length % 64 == 0
    assert data[header.length : header.length + of.vector.nbytes] == of.vector.tobytes()
    assert header.metadata == {"layout": of.layout.fingerprint, "t": "5"}
    assert header.size == len(data)
    assert wire.is_flat(header, of.layout)
    assert header_of(of.layout) == header_of(model().layout), "the same for every model of a layout"


def test_what_was_written_reads_back_bit_for_bit() -> None:
    of = model()
    again = unpack(packed(of), of.layout)
    assert same(again, of)
    assert again.vector.ctypes.data % 64 == 0


def test_another_writers_order_is_taken_too() -> None:
    of = model()
    arrays = dict(reversed([(name, np.asarray(array, order="C")) for name, array in of.items()]))
    theirs = save(arrays, {"anything": "goes"})
    assert not wire.is_flat(read_header(theirs), of.layout)
    assert same(unpack(theirs, of.layout), of)


def changed(**changes: Any) -> bytes:
    arrays = {name: np.asarray(array, order="C") for name, array in model().items()} | changes
    return save({name: array for name, array in arrays.items() if array is not None})


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(weight=None), "'weight' is missing"),
        (changed(extra=np.zeros(1, np.float32)), "'extra' is not part of the model"),
        (changed(weight=np.zeros((5, 3), np.float32)), r"'weight' has shape \[5, 3\] but the model's is \[3, 5\]"),
        (changed(weight=np.zeros((3, 5), np.float64)), "'weight' is <f8 but the model's is <f4"),
        (changed(count=np.array(7, np.int32)), "'count' is <i4"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(data: bytes, said: str) -> None:
    with pytest.raises(LayoutMismatch, match=said):
        unpack(data, model().layout)


def framed(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


F32 = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "ends after 0 bytes"),
        (b"\x05\0\0\0\0\0\0\0{}", "within its header"),
        (b"PK\x03\x04 this is a zip file", "no safetensors file"),
        (b"\x80\x04\x95\x1f\0\0\0\0\0\0\0\x8c", "within its header|no safetensors file|not JSON"),
        ((2**63).to_bytes(8, "little"), "claims 9223372036854775808 bytes"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[" * 100_000), "claims 100000 bytes but must have"),
        (framed(b"[" * 50_000), "not a JSON object"),
        (framed(b'{"a":' + b"[" * 50_000), "not described by JSON of at most 4096 bytes"),
        (framed(b"x"), "claims 1 bytes"),
        (framed(b"{x:1}"), "not JSON"),
        (framed(b'{"a":{}'), "not JSON|needs dtype"),
        (framed(b'{"a":1,}'), "needs dtype|not JSON"),
        (framed(b"{} {}"), "not JSON"),
        (framed({"a": {**F32, "shape": [1] * 33}}), "at most 32"),
        (framed({"a": {**F32, "shape": [2**63]}}), "63 bits"),
        (framed({"b" * 5000: F32}), "at most 4096 bytes"),
        (framed([1, 2]), "not a JSON object"),
        (framed(json.dumps({"a": F32, "b": F32}).replace("b", "a").encode()), "twice"),
        (framed(b'{"a":{"dtype":"F32","dtype":"F32"}}'), "twice"),
        (framed({"a": 3}), "needs dtype"),
        (framed({"a": {**F32, "dtype": "BF17"}}), "needs dtype"),
        (framed({"a": {**F32, "data_offsets": [0]}}), "needs dtype"),
        (framed({"a": {**F32, "shape": [-1]}}), "no whole numbers"),
        (framed({"a": {**F32, "shape": [1.0]}}), "no whole numbers"),
        (framed({"a": {**F32, "shape": [True]}}), "no whole numbers"),
        (framed({"a": {**F32, "shape": [2**62, 2**62]}}), "needs others"),
        (framed({"a": {**F32, "data_offsets": [4, 0]}}), "needs others"),
        (framed({"a": {**F32, "data_offsets": [4, 8]}}), "gap or overlap"),
        (framed({"a": F32, "b": F32}), "gap or overlap"),
        (framed({"__metadata__": {"a": 1}}), "object of texts"),
        (framed({"a": F32}, b"123"), "has 63 bytes but its header describes 64|describes"),
    ],
)
def test_bytes_that_are_no_model_are_one_known_error(data: bytes, said: str) -> None:
    with pytest.raises(BadPayload, match=said) as error:
        unpack(data, model().layout)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


GOOD = packed(model())


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.binary(max_size=400) | st.binary(max_size=200).map(lambda raw: framed(raw)))
@example(GOOD)
@example(GOOD[:-1])
def test_any_bytes_give_a_model_or_one_known_error(data: bytes) -> None:
    with suppress(BadPayload, LayoutMismatch):
        unpack(data, model().layout)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_file_gives_a_model_or_one_known_error(damage: list[tuple[int, int]]) -> None:
    data = bytearray(GOOD)
    for place, value in damage:
        data[place] = value
    with suppress(BadPayload, LayoutMismatch):
        unpack(bytes(data), model().layout)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.binary(max_size=120) | st.just(GOOD), st.integers(1, 40))
def test_byte_by_byte_is_as_good_as_whole(data: bytes, step: int) -> None:
    def whole() -> object:
        try:
            return HeaderReader(header_max=1000).feed(data)
        except BadPayload as error:
            return str(error)

    def in_parts() -> object:
        reader, found = HeaderReader(header_max=1000), None
        try:
            for start in range(0, len(data), step):
                found = reader.feed(data[start : start + step])
                if found is not None:
                    return found
        except BadPayload as error:
            return str(error)
        return found

    assert in_parts() == whole()


def test_a_header_is_bounded_before_it_is_kept() -> None:
    reader = HeaderReader(header_max=1000)
    with pytest.raises(BadPayload, match=r"2\.\.1000"):
        reader.feed((1001).to_bytes(8, "little"))
    assert len(reader._bytes) == 8


def test_what_safetensors_has_no_word_for_is_refused() -> None:
    odd = Model.of({"x": np.zeros(1, np.float32), "c": np.zeros(1, np.complex64)[:0].astype("S3")}, buffers=["c"])
    with pytest.raises(InvalidValue, match="no word for"):
        header_of(odd.layout)


def test_what_is_unloaded_can_be_read_again(tmp_path: Path) -> None:
    of, file = model(), tmp_path / "x.safetensors"
    file.write_bytes(packed(of))
    there = mapped(file, of.layout)
    unload([there.vector, of.vector])
    assert same(there, of)


@pytest.mark.skipif(not SMAPS.exists(), reason="only Linux tells what of a file is in memory")
def test_what_is_unloaded_takes_no_memory(tmp_path: Path) -> None:
    of, file = Model.of({"x": np.ones(UNLOADED_MIN // 4, np.float32)}), tmp_path / "x.safetensors"
    file.write_bytes(packed(of))
    there = mapped(file, of.layout)
    assert there.vector.sum() == of.vector.size
    assert resident_kb(file) >= UNLOADED_MIN >> 10
    unload([there.vector])
    assert resident_kb(file) == 0


def resident_kb(file: Path) -> int:
    """How much of a mapped file is in memory."""
    behind = SMAPS.read_text().partition(str(file))[2]
    return int(behind.partition("Rss:")[2].split()[0])


def test_to_read_a_header_the_body_is_not_copied() -> None:
    of = model()
    data = packed(of)
    assert read_header(memoryview(data)) == read_header(data + bytes(64))
    assert fed(lambda: unpack(data, of.layout)) == [len(header_of(of.layout))]


def fed(read: Callable[[], object]) -> list[int]:
    """How many bytes are given to readers of headers."""
    seen: list[int] = []
    feed = HeaderReader.feed

    def note(self: HeaderReader, data: bytes) -> wire.Header | None:
        seen.append(len(data))
        return feed(self, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HeaderReader, "feed", note)
        read()
    return seen
