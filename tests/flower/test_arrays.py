"""Flower's records as flat models and back: names, order, dtypes, and what does not mix."""

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord

from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.flower.grid_messages import Arrays
from tests.flower.fake import FakeGrid, Node, reply, start

pytestmark = pytest.mark.slow


def record(**arrays: Any) -> ArrayRecord:
    return ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})


def mixture() -> ArrayRecord:
    """Every kind of array, the whole numbers first: torch has BatchNorm's counter in the middle."""
    return record(
        count=np.array(3, np.int64),
        wide=np.array([1.0, 2.0], np.float64),
        flags=np.array([True, False]),
        narrow=np.array([[0.5]], np.float16),
        plain=np.array([1.5, -0.0], np.float32),
        none=np.zeros((0, 2), np.float32),
    )


def test_a_record_comes_back_as_it_was() -> None:
    arrays = Arrays(mixture())
    back = arrays.record(arrays.model(mixture()))
    assert list(back) == list(mixture())
    for name, array in mixture().items():
        assert back[name].numpy().dtype == array.numpy().dtype
        assert back[name].numpy().tobytes() == array.numpy().tobytes()


def test_what_has_more_digits_than_are_mixed_is_named() -> None:
    assert Arrays(mixture()).rounded == ["wide"]


def test_one_model_is_one_record() -> None:
    arrays = Arrays(mixture())
    model = arrays.model(mixture())
    assert arrays.record(model) is arrays.record(model)


def test_floats_mix_in_float32_and_go_out_as_they_came_and_whole_numbers_follow_the_newest() -> None:
    def answer(message: Any, _node: int) -> Any:
        received = {name: array.numpy() for name, array in message.content["arrays"].items()}
        assert {name: str(array.dtype) for name, array in received.items()} == {
            "count": "int64",
            "wide": "float64",
            "flags": "bool",
            "narrow": "float16",
            "plain": "float32",
            "none": "float32",
        }
        changed = {"count": np.array(received["count"] + 7), "flags": ~received["flags"]}
        return reply(message, {name: array + array.dtype.type(1) for name, array in received.items()} | changed)

    result = start(FakeGrid({4: Node(answer=answer)}), arrays=mixture(), epochs=1, alpha=0.5, staleness_fn="constant")
    mixed = {name: array.numpy() for name, array in result.arrays.items()}
    assert mixed["count"] == 10
    assert mixed["flags"].tolist() == [False, True]
    assert mixed["wide"].tolist() == [1.5, 2.5]
    assert mixed["narrow"].tolist() == [[1.0]]
    assert mixed["plain"].tolist() == [2.0, 0.5]
    assert mixed["wide"].dtype == np.float64


def test_floats_may_come_in_another_width_and_what_is_too_large_is_infinite() -> None:
    arrays = Arrays(record(x=np.zeros(2, np.float32)))
    assert arrays.model(record(x=np.array([0.1, 1e300])))["x"].tolist() == [np.float32(0.1), np.inf]


@pytest.mark.parametrize(
    ("arrays", "what"),
    [
        ({"x": np.zeros(3, np.float32), "n": np.array(0)}, "'x' has shape"),
        ({"x": np.zeros(2, np.float32)}, "n missing"),
        ({"x": np.zeros(2, np.float32), "n": np.array(0), "y": np.zeros(1)}, "y not part"),
        ({"x": np.zeros(2, np.float32), "n": np.array(0.5)}, "'n' is float32"),
        ({"x": np.zeros(2, np.int64), "n": np.array(0)}, "'x' is int64"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arrays: dict[str, Any], what: str) -> None:
    known = Arrays(record(x=np.zeros(2, np.float32), n=np.array(0)))
    with pytest.raises(LayoutMismatch, match=what):
        known.model(record(**arrays))


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(InvalidValue, match="'c' is complex64"):
        Arrays(record(x=np.zeros(2, np.float32), c=np.zeros(2, np.complex64)))
    with pytest.raises(InvalidValue, match="empty"):
        Arrays(record(n=np.array(0)))


def test_bytes_that_are_no_array_are_refused() -> None:
    known = Arrays(record(x=np.zeros(2, np.float32)))
    with pytest.raises(InvalidValue, match="numpy cannot read"):
        known.model(ArrayRecord({"x": Array("float32", (2,), "numpy.ndarray", b"garbage")}))
    with pytest.raises(InvalidValue, match="numpy cannot read"):
        known.model(ArrayRecord({"x": Array("float32", (2,), "something.else", b"")}))
