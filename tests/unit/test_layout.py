"""A model is one flat float32 vector with named views; what does not fit is refused by name and changes nothing."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.core.layout import ALIGNMENT, Array, Layout, Model, aligned
from offbeat.errors import InvalidValue, LayoutMismatch, OffbeatError

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
SHAPES_BY_NAME = st.dictionaries(st.text(max_size=8), SHAPES, min_size=1, max_size=6).filter(
    lambda shapes: any(np.prod(shape) for shape in shapes.values())
)


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.normal(size=shape), np.float32) for name, shape in shapes.items()}


def network() -> dict[str, Array]:
    arrays = filled({"mean": (3,), "w": (3, 2), "b": (2,), "var": (3,), "head": (2, 2)})
    return arrays | {"count": np.asarray(7, np.int64), "mask": np.array([True, False])}


BUFFERS = ("mean", "var", "count", "mask")


def net() -> Model:
    return Model.of(network(), buffers=BUFFERS)


@settings(derandomize=True, deadline=None, max_examples=150)
@given(SHAPES_BY_NAME, st.integers(0, 1000))
def test_round_trip_whatever_names_and_shapes(shapes: dict[str, tuple[int, ...]], seed: int) -> None:
    arrays = filled(shapes, seed)
    model = Model.of(arrays)
    assert list(model) == list(arrays)
    assert len(model) == len(arrays)
    assert model.vector.size == model.layout.size == model.layout.parameter_size
    assert np.array_equal(model.vector, np.concatenate([array.ravel() for array in arrays.values()]))
    for name, array in arrays.items():
        assert model[name].shape == array.shape
        assert np.array_equal(model[name], array)
    again = model.layout.pack(model)
    assert np.array_equal(again.vector, model.vector)


def test_named_arrays_are_views_of_the_vector() -> None:
    arrays = network()
    model = Model.of(arrays, buffers=BUFFERS)
    for slot in model.layout.slots:
        assert np.shares_memory(model[slot.name], model.vector)
        assert not np.shares_memory(model[slot.name], arrays[slot.name])
    model["w"][1, 1] = 42
    assert model.vector[model.layout.places["w"].offset + 3] == 42
    model.vector[:] = 5
    assert (model["mean"] == 5).all()


@pytest.mark.parametrize("size", [1, 3, 16, 17, 1000, 100_003])
def test_vectors_start_on_a_boundary(size: int) -> None:
    vectors = [aligned(size) for _ in range(20)]
    assert all(vector.ctypes.data % ALIGNMENT == 0 for vector in vectors)
    assert all(vector.shape == (size,) and vector.dtype == np.float32 for vector in vectors)
    assert ALIGNMENT == 64


def test_models_and_their_copies_are_aligned() -> None:
    model = net()
    assert model.vector.ctypes.data % 64 == model.copy().vector.ctypes.data % 64 == 0


def test_parameters_come_first_then_float_buffers_and_whole_numbers_beside() -> None:
    layout = net().layout
    assert [slot.name for slot in layout.slots] == ["w", "b", "head", "mean", "var"]
    assert [slot.offset for slot in layout.slots] == [0, 6, 8, 12, 15]
    assert (layout.parameter_size, layout.size) == (12, 18)
    assert [(c.name, c.shape, np.dtype(c.dtype).name) for c in layout.carried] == [
        ("count", (), "int64"),
        ("mask", (2,), "bool"),
    ]


def test_buffers_that_are_no_floats_are_carried() -> None:
    arrays = network()
    model = Model.of(arrays, buffers=BUFFERS)
    assert model["count"] == 7
    assert model["count"].dtype == np.int64
    assert not np.shares_memory(model["mask"], arrays["mask"])
    assert set(model) == set(arrays)


def tied_arrays() -> dict[str, Array]:
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    return {"embed": weight, "b": np.ones(2, np.float32), "head": weight}


def test_tied_arrays_share_one_slice_and_stay_tied() -> None:
    model = Model.of(tied_arrays())
    assert model.layout.size == 8
    assert model.layout.tied == (("head", "embed"),)
    assert np.shares_memory(model["head"], model["embed"])
    model["head"][0, 0] = 9
    assert model["embed"][0, 0] == 9
    copy = model.copy()
    copy["embed"][2, 1] = 8
    assert copy["head"][2, 1] == 8


def test_an_update_may_leave_out_the_tied_name_or_repeat_it() -> None:
    model = Model.of(tied_arrays())
    whole = {name: array.copy() for name, array in model.items()}
    short = {name: array for name, array in whole.items() if name != "head"}
    for arrays in (whole, short):
        assert np.array_equal(model.layout.pack(arrays).vector, model.vector)


def test_a_tied_name_with_other_values_is_refused() -> None:
    model = Model.of(tied_arrays())
    arrays = {name: array.copy() for name, array in model.items()}
    arrays["head"][1, 1] += 1
    with pytest.raises(LayoutMismatch, match="'head' is tied to 'embed'"):
        model.layout.pack(arrays)


def test_a_tied_array_may_hold_nan_which_is_for_admission_to_refuse() -> None:
    arrays = tied_arrays()
    arrays["embed"][0, 0] = np.nan
    assert np.isnan(Model.of(arrays)["head"][0, 0])


def test_frozen_arrays_are_left_out() -> None:
    model = Model.of(network(), buffers=BUFFERS, frozen=("w", "mask"))
    assert set(model) == {"b", "head", "mean", "var", "count"}
    assert model.layout.size == 12
    with pytest.raises(LayoutMismatch, match="w"):
        model.layout.pack(dict(model) | {"w": np.zeros((3, 2), np.float32)})


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "bool", "complex64", ">f4"])
def test_parameters_that_are_not_float32_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidValue, match=r"'odd' is .*must be float32"):
        Layout.of({"w": np.ones(2, np.float32), "odd": np.ones(3, dtype)})


@pytest.mark.parametrize("dtype", ["float64", "float16", "complex64"])
def test_float_buffers_that_are_not_float32_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidValue, match=r"'odd' is .*must be float32"):
        Layout.of({"w": np.ones(2, np.float32), "odd": np.ones(3, dtype)}, buffers=["odd"])


def test_frozen_arrays_may_have_any_type() -> None:
    arrays: dict[str, Array] = {"w": np.ones(2, np.float32), "odd": np.ones(3, np.float64)}
    assert list(Model.of(arrays, frozen=["odd"])) == ["w"]


def test_names_that_are_no_arrays_are_refused() -> None:
    for roles in ({"buffers": ["mean"]}, {"frozen": ["mean"]}):
        with pytest.raises(InvalidValue, match="'mean' is called a buffer or frozen"):
            Layout.of({"w": np.ones(2, np.float32)}, **roles)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"b": np.zeros(3, np.float32)}, r"'b' has shape \[3\] but the model's is \[2\]"),
        ({"w": np.zeros((2, 3), np.float32)}, "'w' has shape"),
        ({"b": np.zeros((1, 2), np.float32)}, "'b' has shape"),
        ({"var": np.zeros(3, np.float64)}, "'var' is float64 but the model's is float32"),
        ({"head": np.zeros((2, 2), np.float16)}, "'head' is float16"),
        ({"count": np.asarray(1, np.int32)}, "'count' is int32 but the model's is int64"),
        ({"count": np.zeros(1, np.int64)}, "'count' has shape"),
        ({"stranger": np.zeros(2, np.float32)}, "stranger not part of the model"),
    ],
)
def test_an_update_that_does_not_fit_is_refused_by_name(change: dict[str, Array], complaint: str) -> None:
    model = net()
    arrays = {name: array.copy() for name, array in model.items()} | change
    before = {name: array.copy() for name, array in arrays.items()}
    vector = model.vector.copy()
    with pytest.raises(LayoutMismatch, match=complaint):
        model.layout.pack(arrays)
    assert np.array_equal(model.vector, vector)
    assert all(np.array_equal(arrays[name], before[name]) for name in before)


@pytest.mark.parametrize("name", ["b", "var", "count"])
def test_an_update_that_lacks_an_array_is_refused_by_name(name: str) -> None:
    arrays = {other: array for other, array in net().items() if other != name}
    with pytest.raises(LayoutMismatch, match=f"{name} missing from the update"):
        net().layout.pack(arrays)


@pytest.mark.parametrize(
    ("arrays", "roles"),
    [
        ({}, {}),
        ({"w": np.zeros((0, 3), np.float32)}, {}),
        ({"w": np.ones(2, np.float32)}, {"frozen": ["w"]}),
        ({"mean": np.ones(2, np.float32)}, {"buffers": ["mean"]}),
    ],
)
def test_a_model_with_nothing_to_train_is_refused(arrays: dict[str, Array], roles: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="the model is empty"):
        Model.of(arrays, **roles)


def test_arrays_that_overlap_are_refused() -> None:
    memory = np.zeros((4, 4), np.float32)
    for views in (
        {"a": memory[:3], "b": memory[2:]},
        {"a": memory, "b": memory.T},
        {"a": memory[:2], "b": memory[:2].reshape(8)},
        {"a": memory[:3], "b": memory[1:2], "c": memory[3:]},
    ):
        with pytest.raises(InvalidValue, match="overlap in memory"):
            Layout.of(views)


def test_arrays_that_overlap_with_another_that_starts_between_them_are_refused() -> None:
    memory = np.zeros((4, 4), np.float32)
    with pytest.raises(InvalidValue, match="overlap in memory"):
        Layout.of({"left": memory[:, :2], "right": memory[:, 2:], "inside left": memory[1:2, :1]})


def test_neighbours_and_interleaved_arrays_do_not_overlap() -> None:
    memory = np.arange(8, dtype=np.float32)
    model = Model.of({"a": memory[::2], "b": memory[1::2]})
    assert model.vector.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert Model.of({"a": memory[:4], "b": memory[4:]}).vector.tolist() == memory.tolist()


def test_a_frozen_model_is_read_only() -> None:
    model = net()
    assert model.freeze() is model
    for array in (model.vector, *model.values()):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_a_copy_is_independent_and_writable() -> None:
    model = net().freeze()
    before = model.vector.copy()
    copy = model.copy()
    assert copy.layout == model.layout
    copy.vector[:] = 0
    copy["count"][...] = 99
    copy["mask"][:] = True
    assert np.array_equal(model.vector, before)
    assert model["count"] == 7
    assert model["mask"].tolist() == [True, False]


def test_fingerprints_are_equal_for_equal_layouts_alone() -> None:
    same = net().layout.fingerprint
    assert Model.of(network(), buffers=BUFFERS).layout.fingerprint == same
    arrays = network()
    others = [
        Layout.of(arrays, buffers=("count", "mask")),
        Layout.of(arrays, buffers=BUFFERS, frozen=("b",)),
        Layout.of(arrays | {"count": np.asarray(7, np.int32)}, buffers=BUFFERS),
        Layout.of(arrays | {"b": np.ones((1, 2), np.float32)}, buffers=BUFFERS),
        Layout.of({name + "_": array for name, array in arrays.items()}, buffers=[name + "_" for name in BUFFERS]),
        Layout.of(dict(reversed(arrays.items())), buffers=BUFFERS),
        Layout.of(arrays | {"twin": arrays["w"]}, buffers=BUFFERS),
    ]
    assert len({same, *(layout.fingerprint for layout in others)}) == len(others) + 1
    assert all(layout != net().layout for layout in others)


def test_fingerprints_tell_what_is_trained_from_what_is_not() -> None:
    arrays = filled({"w": (2,), "mean": (2,)})
    trained, kept = Layout.of(arrays), Layout.of(arrays, buffers=["mean"])
    assert trained.slots == kept.slots
    assert trained.fingerprint != kept.fingerprint


def test_scalars_and_empty_arrays_have_their_place() -> None:
    scalar, empty = np.asarray(2.5, np.float32), np.zeros((0, 3), np.float32)
    model = Model.of({"first": empty, "scale": scalar, "w": np.ones(2, np.float32), "last": empty})
    assert (model.layout.size, model.layout.tied) == (3, ())
    assert model["scale"].shape == ()
    assert model["first"].shape == model["last"].shape == (0, 3)
    model["scale"][...] = 4
    assert model.vector.tolist() == [4, 1, 1]


@pytest.mark.parametrize(
    "vector",
    [aligned(17), aligned(18).astype(np.float64), np.zeros((18, 1), np.float32), np.zeros(36, np.float32)[::2]],
)
def test_a_vector_that_does_not_fit_its_layout_is_refused(vector: Any) -> None:
    model = net()
    with pytest.raises(LayoutMismatch, match=r"the vector is .* this layout has contiguous float32\[18\]"):
        Model(model.layout, vector, model.carried)


def test_carried_buffers_must_be_those_of_the_layout() -> None:
    model = net()
    for carried in (None, {"count": model["count"]}, {**model.carried, "other": model["count"]}):
        with pytest.raises(LayoutMismatch, match="carried buffers"):
            Model(model.layout, model.vector, carried)


def test_an_unknown_name_is_a_key_error() -> None:
    with pytest.raises(KeyError, match="nobody"):
        net()["nobody"]
    assert "nobody" not in net()


def test_refusals_belong_to_the_error_tree() -> None:
    with pytest.raises(OffbeatError) as refusal:
        Model.of({})
    assert isinstance(refusal.value, ValueError)
