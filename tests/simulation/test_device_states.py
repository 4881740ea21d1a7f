"""What devices keep between tasks, in the simulator: whatever is interrupted, refused or lost, it follows decisions."""

from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.settings import Settings
from offbeat.sim.choose import executor_of
from offbeat.sim.device_states import NOTHING_KEPT, DeviceStates
from offbeat.sim.executors import Batched, CompiledLoops
from offbeat.sim.processes import ProgramProcesses
from offbeat.sim.run import Simulation, StopRequested
from offbeat.storage.run_folder import RunFolder
from offbeat.task import DeviceState, Trained
from tests.simulation.heavy_ball import HeavyBall

TASK: Any = HeavyBall()
COMMON: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "seed": 4, "epochs": 40}
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {},
    "delta": {"rule": "delta"},
    "fedbuff": {"rule": "fedbuff:3"},
    "fedavg": {"rule": "fedavg:2"},
    "over-selection": {"rule": "fedavg:2", "over_selection": 1.5},
    "mixing": {"mix_s": 0.5, "queue_max": 4},
    "dropout": {"dropout": 0.3, "lease_s": 2.0},
    "reject": {"staleness_policy": "reject", "staleness_max": 2},
}


def simulation(folder: Path | None = None, **settings: Any) -> Simulation:
    return Simulation(TASK, Settings.of({**COMMON, **settings}), folder=folder)


def visits(of: Simulation) -> dict[int, int]:
    """How many trainings every device remembers."""
    states = of.plane.states()
    return {int(name.split()[1]): int(state["visits"]) for name, state in states.items() if name.startswith("state ")}


def applied_per_device(of: Simulation) -> dict[int, int]:
    counts: dict[int, int] = {}
    for decision in of.curve.decisions or []:
        counts[decision.lease.device] = counts.get(decision.lease.device, 0) + 1
    return counts


@pytest.mark.parametrize("method", METHODS)
def test_a_device_remembers_exactly_the_trainings_whose_updates_were_applied(method: str) -> None:
    """Refused, revoked and lost updates leave its state as it was, and none that was applied is forgotten."""
    run = simulation(**METHODS[method])
    run.run()
    assert visits(run) == applied_per_device(run)
    assert {name: state.number for name, state in run.plane.states().items() if name.startswith("state ")} == {
        f"state {device}": count for device, count in visits(run).items()
    }


def test_some_of_them_are_refused_or_lost() -> None:
    """Else the test above would show nothing."""
    run = simulation(**METHODS["reject"])
    run.run()
    assert run.coordinator.judge.decisions > run.coordinator.applied


def test_processes_give_the_bits_of_inline() -> None:
    inline, processes = (offbeat.simulate(TASK, **{**COMMON, "executor": name}) for name in ("inline", "processes:2"))
    assert inline.summary["x_sha256"] == processes.summary["x_sha256"]
    assert inline.ledger == processes.ledger
    forgetful: Any = HeavyBall()
    object.__setattr__(forgetful, "train", lambda model, work, _state: TASK.train(model, work, NOTHING_KEPT))
    assert offbeat.simulate(forgetful, **COMMON).summary["x_sha256"] != inline.summary["x_sha256"]


@pytest.mark.parametrize("method", METHODS)
def test_an_interrupted_run_ends_with_the_bits_of_an_uninterrupted_one(method: str, tmp_path: Path) -> None:
    whole = simulation(tmp_path / "whole", **METHODS[method]).run()
    for stop in range(3, 200, 9):
        run = simulation(tmp_path / "run", **METHODS[method])
        while not run.finished and run.engine.handled < stop:
            run.executor.finish(run.engine.advance(handled_max=stop))
        run.checkpoint()
        run.close()
    again = simulation(tmp_path / "run", **METHODS[method]).run()
    assert again.summary["x_sha256"] == whole.summary["x_sha256"]
    assert again.ledger == whole.ledger


@pytest.mark.parametrize("method", ["fedasync", "fedavg", "mixing"])
def test_so_has_one_that_is_extended_and_interrupted_again(method: str, tmp_path: Path) -> None:
    simulation(tmp_path / "run", **METHODS[method], epochs=20).run()
    longer = simulation(tmp_path / "run", **METHODS[method], epochs=60)
    with pytest.raises(StopRequested):
        longer.run(_stopping_at(35))
    found = simulation(tmp_path / "run", **METHODS[method], epochs=60).run()
    whole = simulation(tmp_path / "whole", **METHODS[method], epochs=60).run()
    assert found.summary["x_sha256"] == whole.summary["x_sha256"]


def _stopping_at(t: int) -> Any:
    def look(of: Simulation) -> None:
        if of.coordinator.t >= t:
            raise StopRequested

    return look


def test_an_update_that_waits_to_be_mixed_is_trained_again_from_the_state_that_it_started_from(tmp_path: Path) -> None:
    """Its device has the next state already, and a task that started from that one."""
    run = simulation(tmp_path / "run", **METHODS["mixing"])
    while not any(name.startswith("start ") for name in run.plane.states()):
        run.executor.finish(run.engine.advance(handled_max=run.engine.handled + 1))
    run.checkpoint()
    run.close()
    whole = simulation(tmp_path / "whole", **METHODS["mixing"]).run()
    assert simulation(tmp_path / "run", **METHODS["mixing"]).run().summary["x_sha256"] == whole.summary["x_sha256"]


def test_the_states_count_for_what_a_finished_run_may_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sim.run.END_BYTES_MAX", 600)
    plain: Any = HeavyBall(keeps_state=False)
    object.__setattr__(plain, "train", lambda model, work: TASK.train(model, work, NOTHING_KEPT)[0])
    kept = []
    for name, task in (("plain", plain), ("stateful", TASK)):
        Simulation(task, Settings.of({**COMMON, "in_flight_max": 1}), folder=tmp_path / name).run()
        kept.append(RunFolder.open(tmp_path / name).checkpoint_path.exists())
    assert kept == [True, False]


# --- one after the other ---------------------------------------------------------------------------------------------


def test_a_state_is_committed_only_onto_the_one_that_it_started_from() -> None:
    states = DeviceStates(TASK)
    first, second, late = DeviceState(number=1), DeviceState(number=2), DeviceState(number=1)
    states.commit(3, NOTHING_KEPT, first)
    states.commit(3, NOTHING_KEPT, late)
    assert states.of(3) is first
    states.commit(3, first, second)
    assert states.of(3) is second
    assert states.of(0) is NOTHING_KEPT


# --- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tasks_per_device": 2}, "a device has one task at a time, but tasks_per_device is 2; leave it out"),
        ({"device_model": "sampled:4"}, "with device_model sampled:4 a device may have several tasks at once"),
        *(
            ({"executor": name}, f"executor {name} is not possible for this task: it keeps state between tasks")
            for name in ("batched", "compiled", "batched+processes:2", "ray+batched")
        ),
        ({"executor": "compiled-torch"}, "executor compiled-torch is not possible: it keeps state between tasks"),
        ({"executor": "channels-last:1"}, "executor channels-last is not possible: it keeps state between tasks"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(wrong: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue) as refused:
        simulation(tmp_path / "run", **wrong)
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_sampled_staleness_of_nothing_has_one_task_at_a_time() -> None:
    run = simulation(device_model="sampled:1")
    run.run()
    assert visits(run) == applied_per_device(run)


class Batchable(HeavyBall):
    """Could train many at once, but for the states."""

    def batchable(self) -> str | None:
        return None

    def train_many(self, jobs: Any) -> Any: ...

    def compilable(self) -> str | None:
        return None

    def train_compiled(self, jobs: Any, threads: int) -> Any: ...

    def evaluate_compiled(self, model: Any) -> Any: ...


def test_auto_chooses_an_executor_that_carries_states() -> None:
    task: Any = Batchable()
    for parameters, names in ((20, {"inline"}), (10**6, {"inline", "processes"})):
        chosen = executor_of(task, "auto", parameters=parameters, in_flight_max=4)
        assert chosen.executor.name in names
        chosen.executor.close()
    for make in (Batched, lambda of: CompiledLoops(of, 1), lambda of: ProgramProcesses(of, "compiled-torch")):
        with pytest.raises(InvalidValue, match="it keeps state between tasks"):
            make(task)


def test_a_task_that_returns_no_state_is_told_so_from_another_process() -> None:
    with pytest.raises(OffbeatError, match="keeps_state must return two things"):
        offbeat.simulate(Silent(), executor="processes:1", epochs=3)


class Silent(HeavyBall):
    def train(self, model: Any, work: Any, state: DeviceState) -> Any:  # noqa: ARG002
        return Trained(1, 1)
