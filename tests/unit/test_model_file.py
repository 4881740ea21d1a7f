"""Models on disk: any safetensors reader reads them, bits are kept, and what does not fit is refused by name."""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from offbeat.core.layout import Array, Layout, Model
from offbeat.errors import InvalidValue, LayoutMismatch, OffbeatError
from offbeat.storage.model_file import load_model, load_models, save_model, save_models

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SHAPES_BY_NAME = st.dictionaries(NAMES, SHAPES, min_size=1, max_size=6).filter(
    lambda shapes: any(np.prod(shape) for shape in shapes.values())
)


def filled(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Model:
    """Any bits at all: NaNs with payloads, infinities, denormals, both zeros."""
    rng = np.random.default_rng(seed)
    model = Model.of({name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
    model.vector.view(np.uint32)[:] = rng.integers(0, 2**32, model.vector.size, np.uint32)
    return model


def network() -> Model:
    tied = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffers: dict[str, Array] = {
        "mean": np.ones(3, np.float32),
        "count": np.asarray(7),
        "mask": np.array([True, False]),
    }
    bias = np.array([-0.0, np.nan, 1e-45], np.float32)
    return Model.of({"embed": tied, "bias": bias, "head": tied} | buffers, buffers=buffers)


def same_bits(ours: Model, theirs: Model) -> bool:
    return ours.vector.tobytes() == theirs.vector.tobytes() and all(
        array.dtype == theirs.carried[name].dtype and np.array_equal(array, theirs.carried[name])
        for name, array in ours.carried.items()
    )


@settings(derandomize=True, deadline=None, max_examples=60)
@given(SHAPES_BY_NAME, st.integers(0, 1000), st.dictionaries(NAMES, NAMES, max_size=3))
def test_a_model_reads_back_bit_for_bit(
    shapes: dict[str, tuple[int, ...]], seed: int, metadata: dict[str, str]
) -> None:
    model, other = filled(shapes, seed), filled(shapes, seed + 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        save_model(path, model, metadata)
        again, told = load_model(path, model.layout)
        assert same_bits(again, model)
        assert again.vector.ctypes.data % 64 == 0
        assert told == metadata | {"layout": model.layout.fingerprint, "tied": "{}"}
        save_models(path, {"x": model, "w": other}, metadata)
        models, told = load_models(path, model.layout)
        assert list(models) == ["x", "w"]
        assert same_bits(models["x"], model)
        assert same_bits(models["w"], other)
        assert all(each.vector.ctypes.data % 64 == 0 for each in models.values())
        assert (metadata | {"tied": "{}", "layout": model.layout.fingerprint}).items() <= told.items()
        assert [entry.name for entry in Path(folder).iterdir()] == ["x.safetensors"]


def test_any_safetensors_reader_reads_it(tmp_path: Path) -> None:
    model = network()
    save_model(tmp_path / "x", model, {"t": "3"})
    arrays = load_file(tmp_path / "x")
    assert arrays.keys() == {"embed", "bias", "mean", "count", "mask"}  # `head` is `embed`, stored once
    assert all(np.array_equal(array, model[name], equal_nan=True) for name, array in arrays.items())
    assert {name: array.dtype.str for name, array in arrays.items() if name in model.carried} == {
        "count": "<i8",
        "mask": "|b1",
    }
    again, metadata = load_model(tmp_path / "x", model.layout)
    assert same_bits(again, model)
    assert np.shares_memory(again["head"], again["embed"])
    assert json.loads(metadata["tied"]) == {"head": "embed"}
    assert metadata["t"] == "3"


def test_frozen_models_and_carried_arrays_in_any_order_can_be_written(tmp_path: Path) -> None:
    model = network()
    model.carried["mask"] = np.array([True, True, False, False])[::2]  # every other element: not contiguous
    save_model(tmp_path / "x", model.freeze(), {})
    assert load_file(tmp_path / "x")["mask"].tolist() == [True, False]


def test_what_any_writer_wrote_is_read(tmp_path: Path) -> None:
    model = network()
    save_file({**model, "count": np.asarray(8)}, tmp_path / "x")  # `head` is there too, and equal to `embed`
    again, metadata = load_model(tmp_path / "x", model.layout)
    assert again["count"] == 8
    assert metadata == {}


def test_a_model_that_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_model(path, Model.of({"w": np.zeros(3, np.float32)}), {})
    for arrays, says in [
        ({"w": np.zeros(4, np.float32)}, r"'w' has shape \[3\] but the model's is \[4\]"),
        ({"v": np.zeros(3, np.float32)}, "v missing"),
        ({"w": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)}, "b missing"),
    ]:
        with pytest.raises(LayoutMismatch, match=says) as refused:
            load_model(path, Layout.of(arrays))
        assert str(path) in str(refused.value)
    save_models(path, {"x": network()}, {})
    with pytest.raises(LayoutMismatch, match="missing"):
        load_models(path, Layout.of({"w": np.zeros(3, np.float32)}))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    model = network()
    save_models(tmp_path / "whole", {"x": model, "w": model}, {"t": "3"})
    content = (tmp_path / "whole").read_bytes()
    cut = tmp_path / "cut"
    for size in range(0, len(content), 7):
        cut.write_bytes(content[:size])
        with pytest.raises(InvalidValue, match="damaged or not a safetensors file") as refused:
            load_models(cut, model.layout)
        assert str(cut) in str(refused.value)
        assert "restore it from a copy" in str(refused.value)
    cut.write_bytes(content)
    assert same_bits(load_models(cut, model.layout)[0]["w"], model)


def test_garbage_a_folder_and_nothing_are_refused(tmp_path: Path) -> None:
    layout = network().layout
    (tmp_path / "garbage").write_bytes(bytes(range(256)) * 4)
    for name, says in (("garbage", "damaged"), (".", "damaged"), ("nothing", "there is no model file")):
        with pytest.raises(InvalidValue, match=says) as refused:
            load_model(tmp_path / name, layout)
        assert str(tmp_path / name) in str(refused.value)


def test_one_model_and_several_are_told_apart(tmp_path: Path) -> None:
    model = network()
    save_model(tmp_path / "one", model, {})
    with pytest.raises(InvalidValue, match="does not hold several models"):
        load_models(tmp_path / "one", model.layout)
    save_models(tmp_path / "two", {"x": model, "w": model}, {})
    with pytest.raises(LayoutMismatch, match="missing"):
        load_model(tmp_path / "two", model.layout)


def test_several_models_are_of_one_layout_and_have_plain_names(tmp_path: Path) -> None:
    model, other = network(), Model.of({"w": np.zeros(3, np.float32)})
    with pytest.raises(InvalidValue, match="models of 2 layouts"):
        save_models(tmp_path / "x", {"x": model, "w": other}, {})
    with pytest.raises(InvalidValue, match="save at least one"):
        save_models(tmp_path / "x", {}, {})
    for name in ("", "a/b"):
        with pytest.raises(InvalidValue, match="its name must not be empty"):
            save_models(tmp_path / "x", {name: model}, {})
    assert not list(tmp_path.iterdir())


def test_what_the_format_cannot_hold_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    zeros = np.zeros(2, np.float32)
    dated = Model.of({"w": zeros, "when": np.array(["2020-01-01"], "M8[D]")}, buffers=["when"])
    for model in (Model.of({"__metadata__": zeros}), Model.of({"a\udc80": zeros}), dated):
        with pytest.raises(InvalidValue):
            save_model(tmp_path / "x", model, {})
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, path = network(), tmp_path / "x"
    save_model(path, model, {"t": "1"})

    def full(_path: Path, _content: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OffbeatError, match="No space left on device") as refused:
        save_model(path, model, {"t": "2"})
    assert str(path) in str(refused.value)
    assert load_model(path, model.layout)[1]["t"] == "1"
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


def test_a_path_that_cannot_be_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffbeatError, match="cannot write") as refused:
        save_model(tmp_path / "file" / "x", network(), {})
    assert "\n" not in str(refused.value)
