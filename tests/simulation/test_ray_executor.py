"""The executor for Ray, on a cluster that stands in for it: bits, losses, bounds, and what is in the object store."""

import builtins
import gc
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.hosting.loading import load
from offbeat.settings import Settings
from offbeat.sim.choose import executor_of
from offbeat.sim.executors import Inline, Job
from offbeat.sim.on_ray import cluster, on_node, remote_jobs
from offbeat.sim.on_ray.executor import Ray, Wishes
from offbeat.sim.run import Run, Simulation
from offbeat.task import Trained, Work, start
from tests.simulation.heavy_ball import HeavyBall
from tests.simulation.quadratic import Quadratic
from tests.simulation.standing_in import Gone, StandIn

TASK = Quadratic([0.0, 1.0, 4.0, 9.0], [0.5, 0.7, 0.2, 0.9], size=20, noise=0.3)
SETTINGS = Settings(device_model="lognormal:1", seed=4, epochs=60, evaluate_every=7)


@pytest.fixture(autouse=True)
def _ray_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sim.on_ray.executor.installed", lambda: None)


def on(stand_in: StandIn, task: Any = TASK, **wishes: Any) -> Ray:
    return Ray(task, None, Wishes(**wishes), stand_in.connect)


def run(executor: Any, settings: Settings = SETTINGS) -> Run:
    try:
        return Simulation(executor.task, settings, executor).run()
    finally:
        executor.close()


@pytest.fixture(scope="module")
def inline() -> Run:
    return run(Inline(TASK))


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("places", [1, 2, 5])
def test_the_bits_and_the_curve_are_those_of_inline(places: int, inline: Run) -> None:
    stand_in = StandIn(places, seed=places)
    there = run(on(stand_in))
    assert there.summary["x_sha256"] == inline.summary["x_sha256"]
    assert there.metrics == inline.metrics
    assert (there.summary["actors"], there.summary["redone"]) == (places, 0)
    assert {process for process, verb in stand_in.log if verb == "train"} == set(range(places)), "all have work"
    assert stand_in.is_closed
    assert not any(process.calls for process in stand_in.processes), "what still ran was stopped"


@pytest.mark.usefixtures("_no_model_is_small")
@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_lost_is_done_again_with_the_same_bits(seed: int, inline: Run) -> None:
    stand_in = StandIn(3, loss=0.15, seed=seed)
    there = run(on(stand_in))
    assert there.summary["x_sha256"] == inline.summary["x_sha256"]
    assert there.metrics == inline.metrics
    assert stand_in.lost > 3
    assert there.summary["redone"] > 0


def test_the_states_of_devices_go_there_and_back() -> None:
    task: Any = HeavyBall()
    here, there = run(Inline(task)), run(on(StandIn(3, loss=0.15, seed=2), task))
    assert there.summary["x_sha256"] == here.summary["x_sha256"]
    assert there.summary["redone"] > 0


def test_batched_there_equals_batched_here() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from offbeat.sim.executors import Batched

    settings = Settings(devices=12, epochs=25, seed=3)
    task = load("digits", settings)
    here = run(Batched(task), settings)
    stand_in = StandIn(2, loss=0.3, seed=1)
    there = run(Batched(task, on(stand_in, task)), settings)
    assert there.summary["x_sha256"] == here.summary["x_sha256"]
    assert there.summary["executor"] == "ray+batched"
    assert {verb for _, verb in stand_in.log} == {"be_ready", "train_many"}
    assert stand_in.lost


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_model_is_small")
@pytest.mark.parametrize("results_max", [1, 2, 5, 256])
@pytest.mark.parametrize("loss", [0.0, 0.1])
def test_never_more_results_wait_than_may(results_max: int, loss: float, inline: Run) -> None:
    stand_in = StandIn(4, loss=loss, seed=results_max)
    there = run(on(stand_in, results_max=results_max))
    assert stand_in.waiting_max <= results_max
    assert there.summary["x_sha256"] == inline.summary["x_sha256"]
    if results_max < len(TASK.centres):
        assert stand_in.waiting_max == results_max, "and as many as may"


def test_the_bound_holds_where_nothing_is_asked_for() -> None:
    stand_in = StandIn(4)
    executor = on(stand_in, results_max=6)
    x = start(TASK, 0)
    jobs = [executor.submit(x, Work(0, number)) for number in range(50)]
    assert 4 <= stand_in.waiting_max <= 6
    executor.finish(jobs[::-1])
    assert all(job.done for job in jobs)
    assert stand_in.waiting_max == 6
    executor.close()


# --- the object store ------------------------------------------------------------------------------------------------


@pytest.fixture
def _no_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_jobs, "SMALL_BYTES_MAX", 0)


def test_a_small_model_is_not_put_there(inline: Run) -> None:
    stand_in = StandIn(2)
    assert run(on(stand_in)).summary["x_sha256"] == inline.summary["x_sha256"]
    assert stand_in.puts == 0


@pytest.mark.usefixtures("_no_model_is_small")
def test_a_version_is_put_there_once_and_freed_when_nobody_needs_it() -> None:
    stand_in = StandIn(3)
    executor = on(stand_in)
    old, new = (start(TASK, seed) for seed in (0, 1))
    first = [executor.submit(old, Work(0, number)) for number in range(10)]
    executor.finish(first[:9])
    assert (stand_in.puts, len(stand_in.store)) == (1, 1)
    later = [executor.submit(new, Work(1, number)) for number in range(10)]
    executor.finish(later)
    assert (stand_in.puts, len(stand_in.store)) == (2, 2), "one training from the old one is not done"
    executor.finish(first[9:])
    gc.collect()
    assert len(stand_in.store) == 1
    executor.finish([executor.submit(new, Work(2))])
    assert (stand_in.puts, len(stand_in.store)) == (2, 1), "the newest stays"
    executor.close()


@pytest.mark.usefixtures("_no_model_is_small")
def test_a_whole_run_puts_every_version_once_and_leaves_one(inline: Run) -> None:
    stand_in = StandIn(3, loss=0.1, seed=5)
    executor = on(stand_in)
    simulation = Simulation(TASK, SETTINGS, executor)
    most = 0

    def watch(_: Simulation) -> None:
        nonlocal most
        most = max(most, len(stand_in.store))

    there = simulation.run(watch)
    assert there.summary["x_sha256"] == inline.summary["x_sha256"]
    assert stand_in.puts <= 61, "60 versions and x_0"
    assert most <= simulation.plan.in_flight_max + 6, "those in flight, the newest, and those that are evaluated"
    executor.close()


@pytest.mark.usefixtures("_no_model_is_small")
def test_what_is_cancelled_is_freed_and_takes_no_place() -> None:
    stand_in = StandIn(1)
    executor = on(stand_in, results_max=3)
    models = [start(TASK, seed) for seed in range(6)]
    jobs = [executor.submit(model, Work(0)) for model in models]
    for job in jobs[:5]:
        executor.cancel(job)
    executor.finish(jobs[5:])
    executor.finish([executor.submit(models[5], Work(1, number)) for number in range(20)])
    gc.collect()
    assert len(stand_in.store) == 1
    assert sum(verb == "train" for _, verb in stand_in.log) <= 21 + 2, "what had not begun did not begin"
    executor.close()


# --- what goes wrong -------------------------------------------------------------------------------------------------


class Failing(Quadratic):
    """A task that fails in its own way."""

    def train(self, model: Model, work: Work) -> Trained:
        if work.device == 2:
            raise ZeroDivisionError("in my code")
        return super().train(model, work)


class Deadly(Quadratic):
    """A task that takes its process with it."""

    def train(self, model: Model, work: Work) -> Trained:
        if work.device == 2:
            raise Gone
        return super().train(model, work)


def test_an_error_in_the_users_code_comes_through_and_only_for_its_own_training() -> None:
    executor = on(StandIn(2), Failing([0.0, 1.0, 4.0], [0.5, 0.5, 0.5]))
    x = start(executor.task, 0)
    good, bad = executor.submit(x, Work(0)), executor.submit(x, Work(2))
    executor.finish([good])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="in my code") as error:
            executor.finish([bad])
    assert 'raise ZeroDivisionError("in my code")' in error.value.__notes__[0], "where it was raised"
    assert len(error.value.__notes__) == 1
    assert good.done
    executor.close()


class Unspeakable(Exception):
    """An error that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("no")


def test_an_error_that_cannot_travel_arrives_in_words() -> None:
    def fail() -> None:
        raise Unspeakable("this and that")

    error, answer = on_node.told(fail)
    assert isinstance(error, OffbeatError)
    assert (str(error), answer) == ("Unspeakable: this and that", None)


def test_a_training_that_takes_its_process_with_it_ends_the_run_in_words() -> None:
    stand_in = StandIn(3)
    executor = on(stand_in, Deadly([0.0, 1.0, 4.0], [0.5, 0.5, 0.5]))
    x = start(executor.task, 0)
    jobs: list[Job] = [executor.submit(x, Work(device, number)) for number in range(3) for device in range(3)]
    with pytest.raises(OffbeatError, match="a training was lost 6 times"):
        executor.finish(jobs)
    assert stand_in.lost == pytest.approx(remote_jobs.LOST_MAX, abs=3 * remote_jobs.LOST_MAX)
    executor.close()


def test_a_cluster_on_which_nothing_starts_is_an_error_in_words() -> None:
    stand_in = StandIn(3, loss=1.0)
    with pytest.raises(OffbeatError, match="a training was lost 6 times, perhaps for want of memory: the node is gone"):
        run(on(stand_in))
    assert stand_in.is_closed


def test_a_cluster_that_has_no_room_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StandIn, "ended", lambda *_: [])
    with pytest.raises(OffbeatError, match="no node of the Ray cluster had room for a training in 300 s"):
        run(on(StandIn(2)))


def test_a_training_may_take_longer_than_a_node_may_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in, ended, silent = StandIn(1), StandIn.ended, iter(range(int(2 * remote_jobs.ROOM_WAIT_S)))
    executor = on(stand_in)
    x = start(TASK, 0)
    executor.finish([executor.submit(x, Work(0))])
    monkeypatch.setattr(StandIn, "ended", lambda *given: ended(*given) if next(silent, None) is None else [])
    executor.finish([job := executor.submit(x, Work(1))])
    assert job.done
    executor.close()


def test_a_cluster_without_any_node_left_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, x = on(StandIn(1)), start(TASK, 0)
    executor.finish([executor.submit(x, Work(0))])
    monkeypatch.setattr(StandIn, "ended", lambda *_: [])
    monkeypatch.setattr(StandIn, "resources", lambda _: {"GPU": 1.0})
    with pytest.raises(OffbeatError, match="it has 0 CPUs and 1 GPUs, and each training needs 1 and 0"):
        executor.finish([executor.submit(x, Work(1))])
    executor.close()


def test_a_node_with_other_packages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, node = on_node.packages(), {**on_node.packages(), "numpy": "1.0"}
    monkeypatch.setattr("offbeat.sim.on_ray.executor.packages", lambda: driver)
    monkeypatch.setattr(on_node, "packages", lambda: node)
    with pytest.raises(OffbeatError, match=r"numpy is 1\.0 on a node of the Ray cluster and"):
        run(on(StandIn(2), Quadratic([0.0], [0.25], size=3)))


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "ray", None)
    for spec in ("ray", "ray:2"):
        with pytest.raises(MissingExtra) as error:
            executor_of(TASK, spec, parameters=20, in_flight_max=4)
        assert str(error.value) == "ray is not installed; run: pip install 'offbeat[ray]'"


def test_another_module_that_is_missing_is_not_taken_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(*_: Any) -> Any:
        raise ModuleNotFoundError("No module named 'msgpack'", name="msgpack")

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError) as error:
        cluster.installed()
    assert not isinstance(error.value, MissingExtra)


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "name"), [("ray", "ray"), ("ray:3", "ray:3")])
def test_it_is_named_as_it_was_asked_for(spec: str, name: str) -> None:
    assert executor_of(TASK, spec, parameters=20, in_flight_max=4).executor.name == name


@pytest.mark.parametrize(
    "spec", ["ray:0", "ray:x", "ray+", "batched+ray", "rays", "inline+batched", "+processes", "ray:"]
)
def test_what_is_not_an_executor_is_refused(spec: str) -> None:
    with pytest.raises(InvalidValue, match="is unknown; use auto"):
        executor_of(TASK, spec, parameters=20, in_flight_max=4)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"ray_gpus": -0.1}, r"ray_gpus is -0\.1 but"),
        ({"ray_gpus": 1.5}, r"ray_gpus is 1\.5 but"),
        ({"ray_results_max": 0}, "ray_results_max is 0 but must be >= 1"),
        ({"executor": "ray:5000"}, r"ray:N has 1\.\.4096"),
        ({"executor": "inline", "ray_address": "auto"}, "ray_address is set, but executor is inline"),
        ({"executor": "auto", "ray_results_max": 3}, "ray_results_max is set, but executor is auto"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting: Mapping[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Simulation(TASK, Settings.of({"executor": "ray", **setting}))


def test_where_the_cluster_was_is_no_part_of_the_run() -> None:
    simulation = Simulation(TASK, Settings(executor="ray", ray_address="10.0.0.1:6379", ray_results_max=9))
    written = simulation.settings.as_dict()
    assert (written["executor"], written["ray_address"], written["ray_results_max"]) == ("ray", None, None)
