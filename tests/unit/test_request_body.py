"""JSON that a stranger sent: whatever it is, it is read or refused in less than five milliseconds of processor time."""

import json
from contextlib import suppress
from time import thread_time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.server.context import JSON_BYTES_MAX
from offbeat.server.request_body import DEPTH_MAX, TOKENS_MAX, json_in

AT_ONCE_S = 0.005
TRIES = 5
SIZE = JSON_BYTES_MAX
HOSTILE = {
    "lists": "[" + "[]," * (SIZE // 3 - 2) + "1]",
    "objects": "[" + "{}," * (SIZE // 3 - 2) + "1]",
    "whole numbers": "[" + "1," * (SIZE // 2 - 2) + "1]",
    "floats": "[" + "1.5," * (SIZE // 4 - 2) + "1]",
    "digits": '{"a":' + "9" * (SIZE - 10) + "}",
    "many digits": "[" + ("9" * 4200 + ",") * (SIZE // 4201) + "1]",
    "a long float": '{"a":1.' + "3" * (SIZE - 10) + "}",
    "a long exponent": '{"a":1e' + "3" * (SIZE - 10) + "}",
    "texts": "[" + '"",' * (SIZE // 3 - 2) + "1]",
    "names": "{" + ",".join(f'"{i:x}":1' for i in range(SIZE // 9)) + "}",
    "depth": "[" * SIZE,
    "deep objects": '{"a":' * (SIZE // 5),
    "one text": '"' + "x" * (SIZE - 2) + '"',
    "escapes": '"' + "\\u0041" * (SIZE // 6 - 2) + '"',
    "a text without end": '"' + '\\"' * (SIZE // 2 - 2),
    "quotes": '"' * SIZE,
    "backslashes": "\\" * SIZE,
    "blanks": " " * SIZE,
    "signs": "-" * SIZE,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_holds_the_interpreter_for_long(name: str) -> None:
    def took() -> float:
        begun = thread_time()
        with suppress(ValueError):
            json_in(HOSTILE[name].encode())
        return thread_time() - begun

    assert min(took() for _ in range(TRIES)) < AT_ONCE_S


def test_what_is_deep_long_or_large_is_refused() -> None:
    assert json_in("[" * DEPTH_MAX + "]" * DEPTH_MAX) is not None
    with pytest.raises(ValueError, match="deeper than"):
        json_in("[" * (DEPTH_MAX + 1) + "]" * (DEPTH_MAX + 1))
    assert len(json_in(json.dumps([1] * (TOKENS_MAX - 1)))) == TOKENS_MAX - 1
    with pytest.raises(ValueError, match="more than 2000 parts"):
        json_in(json.dumps([1] * (TOKENS_MAX + 1)))
    with pytest.raises(ValueError, match="more than 400 signs"):
        json_in('{"a": "b", "c": 0.%s}' % ("1" * 500))
    with pytest.raises(ValueError, match="twice"):
        json_in('{"a": 1, "a": 2}')
    with pytest.raises(ValueError, match="utf-8"):
        json_in(b'{"\xff": 1}')


@pytest.mark.parametrize("number", [2**63 - 1, -(2**63) + 1, 0])
def test_a_whole_number_has_63_bits(number: int) -> None:
    assert json_in(json.dumps({"a": number})) == {"a": number}


@pytest.mark.parametrize("number", [2**63, -(2**63), 10**300])
def test_a_larger_whole_number_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="63 bits"):
        json_in(json.dumps({"a": number}))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=DEPTH_MAX - 1,
)


@settings(derandomize=True, deadline=None)
@given(values, st.sampled_from([None, 2]))
def test_what_people_write_is_read_as_ever(value: Any, indent: int | None) -> None:
    text = json.dumps(value, indent=indent)
    try:
        assert json_in(text) == value
    except ValueError as error:
        assert "deeper" in str(error) or "signs" in str(error)  # noqa: PT017 (no other reason is right)
