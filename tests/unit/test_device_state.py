"""What a device keeps between its tasks: a value that no training changes, and that travels and is stored as it is."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

import offbeat
from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue
from offbeat.hosting.task_host import TaskDescription
from offbeat.method import method_of
from offbeat.settings import Settings
from offbeat.storage.model_file import load_models, load_states, save_models, states_file
from offbeat.task import KEPT_DTYPES, DeviceState, Task, Trained, Update, Work, keeps_state, solve
from tests.simulation.heavy_ball import HeavyBall
from tests.simulation.quadratic import Quadratic

X = Model.of({"x": np.arange(20, dtype=np.float32)}).freeze()
TASK: Any = HeavyBall()


def bits(state: DeviceState) -> dict[str, Any]:
    """All that must be alike in two states that are the same."""
    held = {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in state.items()}
    return {"number": state.number, **held}


def brought(update: Update) -> DeviceState:
    assert update.state is not None
    return update.state


kept_arrays = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
    st.sampled_from(sorted(KEPT_DTYPES)).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    ),
    max_size=3,
)


@examples(max_examples=30)
@given(kept_arrays, st.integers(0, 2**40))
def test_a_state_is_the_same_in_another_process_and_on_the_disk(
    tmp_path_factory: pytest.TempPathFactory, arrays: Mapping[str, Array], number: int
) -> None:
    state, folder = DeviceState(arrays, number), tmp_path_factory.mktemp("states", numbered=True)
    save_models(folder / "checkpoint", {"x": X}, {"t": "3"}, {"state 0": DeviceState(), "state 1": state})
    (folder / "alone").write_bytes(states_file({"state 1": state}))
    for found in (
        pickle.loads(pickle.dumps(state)),  # noqa: S301 (made on the line itself)
        load_states(folder / "checkpoint")["state 1"],
        load_states(folder / "alone")["state 1"],
    ):
        assert bits(found) == bits(state)
        assert not any(array.flags.writeable for array in found.values())
    models, metadata = load_models(folder / "checkpoint", X.layout)
    assert list(models) == ["x"]
    assert metadata["t"] == "3"
    assert bits(load_states(folder / "checkpoint")["state 0"]) == bits(DeviceState())


def test_a_state_holds_copies_that_cannot_be_written() -> None:
    given_ = np.zeros(3)
    state = DeviceState({"a": given_})
    given_[0] = 1.0
    assert state["a"][0] == 0.0
    with pytest.raises(ValueError, match="read-only"):
        state["a"][0] = 2.0
    with pytest.raises(AttributeError):
        state.number = 7  # type: ignore[misc]
    swapped = DeviceState({"a": np.array([1, 2], ">i4")})
    assert (swapped["a"].tolist(), swapped["a"].dtype.isnative) == ([1, 2], True)
    assert (state.nbytes, repr(state)) == (24, "DeviceState(a; number 0)")


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"a": "text"}, r"'a' is <U4, but a device keeps bool, .*; convert it"),
        ({"a": None}, "'a' is object"),
        ({"a": np.zeros(2, np.longdouble)}, "'a' is float128|'a' is longdouble"),
        ({"a": [[1], [1, 2]]}, "'a' cannot be kept, for it is no array"),
        ({1: np.zeros(2)}, "is called 1; give it a name that is text"),
        ({"": np.zeros(2)}, "is called ''; give it a name"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(arrays: Any, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        DeviceState(arrays)


def test_a_state_and_a_model_of_one_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="a model and a state are both called 'x'"):
        save_models(tmp_path / "both", {"x": X}, {}, {"x": DeviceState()})
    with pytest.raises(InvalidValue, match="a state is called 'a/b'"):
        save_models(tmp_path / "both", {"x": X}, {}, {"a/b": DeviceState()})
    assert not (tmp_path / "both").exists()


def test_a_checkpoint_of_before_has_no_states(tmp_path: Path) -> None:
    save_models(tmp_path / "old", {"x": X}, {})
    assert load_states(tmp_path / "old") == {}


# --- solving ----------------------------------------------------------------------------------------------------------


def test_a_training_goes_on_from_what_its_device_kept() -> None:
    first = solve(TASK, X, Work(2, 0))
    second = solve(TASK, X, Work(2, 1), first.state)
    assert [brought(update).number for update in (first, second)] == [1, 2]
    assert [int(brought(update)["visits"]) for update in (first, second)] == [1, 2]
    anew = solve(TASK, X, Work(2, 1))
    assert anew.x_new.vector.tobytes() != second.x_new.vector.tobytes()
    assert brought(anew).number == 1


@given(st.integers(0, 3), st.integers(0, 5), st.floats(-2, 2))
def test_trained_twice_from_one_state_the_bits_are_the_same(device: int, number: int, momentum: float) -> None:
    state = DeviceState({"momentum": np.full(20, momentum), "visits": np.array(number)}, number)
    before = bits(state)
    once, again = (solve(TASK, X, Work(device, number), state) for _ in range(2))
    assert once.x_new.vector.tobytes() == again.x_new.vector.tobytes()
    assert bits(brought(once)) == bits(brought(again))
    assert bits(state) == before


class Greedy(HeavyBall):
    """Keeps an array that it goes on changing."""

    own = np.zeros(2)

    def train(self, model: Model, work: Work, state: DeviceState) -> tuple[Trained, Mapping[str, Array]]:  # noqa: ARG002
        self.own[0] += 1
        return Trained(1, 1), {"own": self.own}


def test_what_a_task_does_later_with_its_arrays_changes_no_state() -> None:
    task: Any = Greedy()
    first = brought(solve(task, X, Work(0)))
    solve(task, X, Work(0), first)
    assert first["own"].tolist() == [1.0, 0.0]


def test_other_tasks_are_called_as_ever_and_bring_nothing() -> None:
    task = Quadratic([0.0], [0.5], size=20)
    assert not keeps_state(task)
    assert solve(task, X, Work(0), DeviceState({"a": np.zeros(1)})).state is None
    assert isinstance(TASK, Task)
    assert keeps_state(TASK)
    assert not keeps_state(HeavyBall(keeps_state=False))


class Returning(HeavyBall):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        object.__setattr__(self, "answer", answer)

    def train(self, model: Model, work: Work, state: DeviceState) -> Any:  # noqa: ARG002
        return self.answer  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (Trained(1, 1), "Trained"),
        (None, "NoneType"),
        ((Trained(1, 1), [np.zeros(2)]), r"\(Trained, list\)"),
        ((Trained(1, 1), {}, {}), r"\(Trained, dict, dict\)"),
        (({}, Trained(1, 1)), r"\(dict, Trained\)"),
    ],
)
def test_a_task_that_returns_something_else_is_told_what_to_return(answer: Any, kinds: str) -> None:
    task: Any = Returning(answer)
    with pytest.raises(
        InvalidValue, match=rf"keeps_state must return two things, .*arrays to keep by name, not {kinds}$"
    ):
        solve(task, X, Work(0))


def test_a_server_refuses_several_tasks_per_device_from_what_it_knows_of_the_task() -> None:
    for task in (TASK, TaskDescription.of(TASK, [])):
        with pytest.raises(InvalidValue, match="one task at a time, but tasks_per_device is 3; leave it out"):
            method_of(Settings(tasks_per_device=3), task)
        assert method_of(Settings(), task).plan.tasks_per_device == 1


def test_the_names_are_public() -> None:
    assert offbeat.DeviceState is DeviceState
    assert offbeat.StatefulTask.__name__ == "StatefulTask"
