"""Headers that a stranger wrote: bounded by the layout, read in steps of at most 5 ms of processor time."""

import json
from collections.abc import Iterator
from time import thread_time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from offbeat.core.layout import Layout, Model
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.header_parser import ENTRIES_AT_ONCE, HEADER_SLACK, bytes_of, header_steps
from offbeat.server.update_store import UpdateStore
from offbeat.storage.disk import Disk
from offbeat.wire import BadPayload, ExpectedHeader, HeaderReader, body_of, header_of, is_flat, read_header, unpack

AT_ONCE_S = 0.005
TRIES = 5
"""How often a slow step is measured again: a machine that is busy takes the processor away, but not every time."""
MANY = 10_000


def small() -> Model:
    return Model.of({"x": np.ones(6, np.float32), "y": np.ones((2, 2), np.float32)})


def large() -> Layout:
    names = (f"layers.{i // 4}.attention.{'qkvo'[i % 4]}_proj.weight" for i in range(MANY))
    return Layout.of({name: np.zeros((1, 2), np.float32) for name in names})


LARGE = large()


def longest_step_s(text: bytes, layout: Layout) -> float:
    """The processor time of the longest step in reading this header, at the best of a few tries."""
    return min(max(_steps(text, layout)) for _ in range(TRIES))


def _steps(text: bytes, layout: Layout) -> Iterator[float]:
    steps, going = header_steps(text, len(text) + 8, ExpectedHeader.of(layout).limits), True
    while going:
        begun = thread_time()
        try:
            next(steps)
        except (StopIteration, BadPayload, LayoutMismatch):
            going = False
        yield thread_time() - begun


def hostile(size: int) -> dict[str, bytes]:
    """Headers of about this many bytes that take a careless reader long."""
    entry = b'{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    return {
        "dimensions": b'{"a":{"dtype":"F32","shape":[' + b"9," * (size // 2 - 50) + b'9],"data_offsets":[0,4]}}',
        "large dimensions": b'{"a":{"dtype":"F32","shape":['
        + b"9223372036854775807," * (size // 20 - 5)
        + b'9],"data_offsets":[0,4]}}',
        "digits": b'{"a":{"dtype":"F32","shape":[' + b"9" * (size - 100) + b'],"data_offsets":[0,4]}}',
        "depth": b'{"a":' + b"[" * (size - 10) + b"}",
        "deep objects": b'{"a":' * (size // 5),
        "arrays": b"{" + b",".join(b'"%d":%s' % (i, entry) for i in range(size // 60)) + b"}",
        "one name": b'{"' + b"x" * (size - 10) + b'":1}',
        "an escaped name": b'{"' + b"\\u0041" * (size // 6 - 5) + b'":1}',
        "quotes": b'{"' + b'\\"' * (size // 2 - 5),
        "blanks": b"{" + b" " * (size - 2) + b"}",
        "blanks at the end": b"{}" + b" " * (size - 2),
        "metadata": b'{"__metadata__":{' + b",".join(b'"%d":"x"' % i for i in range(size // 14)) + b"}}",
        "long metadata": b'{"__metadata__":{"a":"' + b"x" * (size - 30) + b'"}}',
        "lists": b'{"a":{"dtype":"F32","shape":[' + b"[]," * (size // 3 - 50) + b'1],"data_offsets":[0,4]}}',
    }


@pytest.mark.parametrize("name", hostile(1000))
def test_a_hostile_header_is_read_in_short_steps(name: str) -> None:
    for layout in (small().layout, LARGE):
        text = hostile(ExpectedHeader.of(layout).limits.header_max)[name]
        assert longest_step_s(text, layout) < AT_ONCE_S


@pytest.mark.parametrize("shape", [[9] * 500_000, [2**63 - 1] * 50_000])
def test_a_megabyte_of_dimensions_is_refused_at_once(shape: list[int]) -> None:
    """The push that froze a server: `math.prod` of the shape took up to a minute."""
    data = framed({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}})

    def took() -> float:
        begun = thread_time()
        with pytest.raises(BadPayload):
            unpack(data, small().layout)
        return thread_time() - begun

    assert min(took() for _ in range(TRIES)) < AT_ONCE_S


def test_ten_thousand_arrays_in_another_order_are_read_in_short_steps_and_taken() -> None:
    names = [slot.name for slot in LARGE.slots]
    data = save({name: np.full((1, 2), i, np.float32) for i, name in enumerate(names)}, {"written by": "another"})
    length = int.from_bytes(data[:8], "little")
    assert longest_step_s(data[8 : 8 + length], LARGE) < AT_ONCE_S
    model = unpack(data, LARGE)
    assert not is_flat(read_header(data), LARGE)
    assert [float(model[name][0, 0]) for name in names[:3]] == [0.0, 1.0, 2.0]


def test_our_own_header_needs_no_parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(*_: object) -> Any:
        raise AssertionError("parsed")

    expected, ours = ExpectedHeader.of(LARGE), header_of(LARGE)
    monkeypatch.setattr("offbeat.wire.parse_header", parsed)
    reader = HeaderReader(expected)
    assert reader.feed(ours[:100]) is None
    assert reader.feed(ours[100:] + b"the body") == expected.header


def test_the_interpreter_is_given_away_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long header is read, the event loop's thread need not even ask for its turn."""
    given = list[float]()
    monkeypatch.setattr("offbeat.header_parser.sleep", given.append)
    text = bytearray(header_of(LARGE)[8:])
    text[-1:] = b"\n"  # not ours byte for byte
    HeaderReader(ExpectedHeader.of(LARGE)).feed(len(text).to_bytes(8, "little") + text)
    assert given == [0] * len(given)
    assert len(given) >= MANY // ENTRIES_AT_ONCE


# --- the limits follow from the layout -------------------------------------------------------------------------------


def framed(header: Any, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_a_header_is_at_most_twice_ours_and_a_little_more(tmp_path: Any) -> None:
    layout = small().layout
    own, limits = len(header_of(layout)), ExpectedHeader.of(layout).limits
    assert limits.header_max == 2 * own + HEADER_SLACK < 100_000
    store = UpdateStore(tmp_path / "updates", layout, Disk())
    assert store.size_max == store.size - own + limits.header_max
    with pytest.raises(BadPayload, match=f"must have 2..{limits.header_max}"):
        HeaderReader(ExpectedHeader.of(layout)).feed((limits.header_max + 1).to_bytes(8, "little"))


def test_more_arrays_than_the_layout_has_are_refused_before_the_rest_is_read() -> None:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    text = json.dumps({"x": entry, "other": entry, "y": entry})[:-1] + ", and this is no JSON"
    with pytest.raises(LayoutMismatch, match="'other' is not part of the model, which has 2 arrays"):
        unpack(framed(text.encode()), small().layout)


def test_pretty_printed_json_and_other_metadata_are_taken() -> None:
    model = small()
    entries = json.loads(header_of(model.layout)[8:])
    body = b"".join(bytes(part) for part in body_of(model))
    for text in (
        json.dumps(entries, indent=4),
        json.dumps(entries, indent="\t") + "\r\n ",
        json.dumps({"__metadata__": {"é" * 100: "ü" * 1000, "empty": ""}, **entries}, ensure_ascii=False),
        json.dumps({name: entry for name, entry in entries.items() if name != "__metadata__"}),
    ):
        assert unpack(framed(text.encode(), body), model.layout).vector.tobytes() == model.vector.tobytes()


def test_names_that_are_not_ascii_and_longer_than_most_are_taken() -> None:
    model = Model.of({"größe": np.ones(2, np.float32), "n" * 9000: np.zeros(3, np.float32)})
    entries = json.loads(header_of(model.layout)[8:])
    body = b"".join(bytes(part) for part in body_of(model))
    text = json.dumps(entries, ensure_ascii=False).encode()
    assert unpack(framed(text, body), model.layout).vector.tobytes() == model.vector.tobytes()


def test_empty_arrays_may_stand_anywhere_between_others() -> None:
    model = Model.of({"a": np.ones(2, np.float32), "e": np.ones((0, 3), np.float32), "z": np.ones(1, np.float32)})
    entry = {"dtype": "F32", "shape": [0, 3]}
    for at, fits in ((0, True), (8, True), (12, True), (4, False), (16, False)):
        entries = json.loads(header_of(model.layout)[8:]) | {"e": {**entry, "data_offsets": [at, at]}}
        if fits:
            assert unpack(framed(entries, bytes(12)), model.layout).vector.size == 3
        else:
            with pytest.raises(BadPayload, match="gap or overlap"):
                unpack(framed(entries, bytes(12)), model.layout)


@given(st.lists(st.integers(0, 2**63 - 1), max_size=40), st.sampled_from([1, 2, 4, 8]))
def test_a_product_is_right_or_too_large(shape: list[int], item: int) -> None:
    product = item
    for number in shape:
        product *= number
    assert bytes_of(shape, item) == (product if product < 2**63 else None)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "F64", "I8", "nope"]) | json_values,
        "shape": st.lists(st.integers(-1, 9), max_size=4) | json_values,
        "data_offsets": st.lists(st.integers(0, 99), min_size=2, max_size=2) | json_values,
    },
)
headers = st.dictionaries(st.sampled_from(["x", "y", "__metadata__", "z"]), entries | json_values, max_size=5)


@settings(derandomize=True, deadline=None, max_examples=500)
@given(headers, st.integers(0, 80), st.sampled_from([None, 1]))
def test_any_header_is_a_model_or_one_known_error(header: Any, body: int, indent: int | None) -> None:
    data = framed(json.dumps(header, indent=indent).encode(), bytes(body))
    said = ""
    try:
        unpack(data, small().layout)
    except (BadPayload, LayoutMismatch) as error:
        said = str(error)
    assert len(said) < 500


@settings(derandomize=True, deadline=None, max_examples=300)
@given(headers, st.booleans())
def test_what_is_read_is_what_the_json_says(header: Any, ascii_only: bool) -> None:
    """Against json.loads, entry by entry."""
    text = json.dumps(header, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        found = read_header(framed(text))
    except InvalidValue:
        return
    said = json.loads(text)
    assert found.metadata == said.pop("__metadata__", {})
    shown = {t.name: (list(t.shape), [t.begin, t.end]) for t in found.tensors}
    assert shown == {name: (entry["shape"], entry["data_offsets"]) for name, entry in said.items()}
