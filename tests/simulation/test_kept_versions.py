"""Simulated: the version that reached the target is the result, and the best one is kept, also over interruptions."""

import hashlib
import json
from math import nan
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import offbeat
from offbeat.cli import main
from offbeat.protocol.best import BestBy
from offbeat.protocol.messages import Evaluated
from offbeat.settings import Settings
from offbeat.sim.run import Simulation
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([9.0, 8.0, 8.5, 9.5, 8.0, 9.0], [0.95] * 6, size=50, noise=0.05)
UNSTEADY = Quadratic([2.0, -1.0, 0.5, 1.0, 0.0, 3.0], [0.5] * 6, size=50, noise=0.3)
COMMON: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "evaluate_every": 1, "seed": 4}


def run_of(task: Quadratic, folder: Path | None = None, **settings: Any) -> offbeat.Run:
    return Simulation(task, Settings.of({**COMMON, **settings}), folder=folder).run()


def value_of(run: offbeat.Run, t: int) -> float:
    return next(point.metrics["x"] for point in run.metrics if point.t == t)


def mean(model: Any) -> float:
    return float(model["x"].mean(dtype="float64"))


def written(folder: Path, *more: str) -> tuple[str, Any]:
    out = folder.parent / "out.safetensors"
    result = CliRunner().invoke(main, ["export", str(folder), str(out), *more])
    assert result.exit_code == 0, result.output
    from safetensors.numpy import load_file

    return result.output.split()[2], load_file(out)


@pytest.mark.parametrize("method", [{}, {"mix_s": 0.2}, {"rule": "fedbuff:3"}, {"mix_s": 0.2, "rule": "fedbuff:3"}])
def test_model_metrics_and_digest_are_of_the_version_that_reached_the_target(
    method: dict[str, Any], tmp_path: Path
) -> None:
    run = run_of(TASK, tmp_path / "run", target="x>=2", epochs=500, **method)
    found = run.summary
    assert found["ended"] == f"target x>=2 reached at epoch {found['result_t']}"
    assert found["x"] == value_of(run, found["result_t"]) == mean(run.x) >= 2
    assert found["x_sha256"] == hashlib.sha256(run.x.vector.tobytes()).hexdigest()
    assert found["result_t"] < found["t"] if "mix_s" in method and "rule" not in method else True
    newest, (t, model) = written(tmp_path / "run", "--epoch", "latest"), written(tmp_path / "run")
    assert (newest[0], t) == (str(found["t"]), str(found["result_t"]))
    assert (mean(model), mean(newest[1])) == (found["x"], value_of(run, found["t"]))


def test_the_result_survives_an_interruption_between_the_target_and_the_end(tmp_path: Path) -> None:
    settings = Settings.of({**COMMON, "target": "x>=2", "mix_s": 0.2})
    simulation = Simulation(TASK, settings, folder=tmp_path / "run")
    while not simulation.coordinator.end_reason:
        simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 1))
    simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 1))
    simulation.checkpoint()
    simulation.close()
    resumed, whole = run_of(TASK, tmp_path / "run", target="x>=2", mix_s=0.2), run_of(TASK, target="x>=2", mix_s=0.2)
    for name in ("t", "result_t", "x", "x_sha256"):
        assert resumed.summary[name] == whole.summary[name]
    assert resumed.summary["result_t"] < resumed.summary["t"]


@pytest.mark.parametrize(("by", "pick"), [("x", max), ("x:min", min)])
def test_the_best_version_is_kept(by: str, pick: Any, tmp_path: Path) -> None:
    run = run_of(UNSTEADY, tmp_path / "run", keep_best=by, epochs=40)
    values = {point.t: point.metrics["x"] for point in run.metrics}
    best_t = pick(values, key=lambda t: values[t])
    found = run.summary
    assert (found["best_t"], found["best_value"]) == (best_t, values[best_t])
    assert (found["result_t"], found["x"]) == (40, values[40])
    assert run.best is not None
    assert mean(run.best) == values[best_t]
    t, model = written(tmp_path / "run", "--best")
    assert (t, mean(model)) == (str(best_t), values[best_t])
    assert run_of(UNSTEADY, epochs=40).summary["x_sha256"] == found["x_sha256"]


def test_the_best_is_right_after_an_interruption(tmp_path: Path) -> None:
    whole = run_of(UNSTEADY, keep_best="x:min", epochs=60)
    for stop in (60, 150):
        simulation = Simulation(
            UNSTEADY, Settings.of({**COMMON, "keep_best": "x:min", "epochs": 60}), folder=tmp_path / "run"
        )
        while simulation.engine.handled < stop:
            simulation.executor.finish(simulation.engine.advance(handled_max=stop))
        simulation.checkpoint()
        simulation.close()
    resumed = run_of(UNSTEADY, tmp_path / "run", keep_best="x:min", epochs=60)
    assert whole.best is not None
    assert resumed.best is not None
    assert resumed.summary["best_t"] == whole.summary["best_t"] > 0
    assert resumed.best.vector.tobytes() == whole.best.vector.tobytes()


def test_an_extended_run_still_has_its_best(tmp_path: Path) -> None:
    run_of(UNSTEADY, tmp_path / "run", keep_best="x", epochs=10)
    extended = run_of(UNSTEADY, tmp_path / "run", keep_best="x", epochs=40)
    whole = run_of(UNSTEADY, keep_best="x", epochs=40)
    assert (extended.summary["best_t"], extended.summary["best_value"]) == (
        whole.summary["best_t"],
        whole.summary["best_value"],
    )


def test_what_cannot_be_kept_is_refused() -> None:
    with pytest.raises(offbeat.OffbeatError, match="keep_best is accuracy but the task's metrics are x"):
        run_of(TASK, keep_best="accuracy", epochs=3)
    with pytest.raises(offbeat.OffbeatError, match="write it like accuracy, loss:min"):
        run_of(TASK, keep_best="x:small", epochs=3)


def test_which_end_of_a_metric_is_good() -> None:
    said = {text: str(BestBy.parse(text)) for text in ("accuracy", "loss", "test.loss", "loss:max", "top_5_error")}
    assert said == {
        "accuracy": "accuracy:max",
        "loss": "loss:min",
        "test.loss": "test.loss:min",
        "loss:max": "loss:max",
        "top_5_error": "top_5_error:min",
    }
    of = BestBy.parse("a").of
    assert of([Evaluated(0.0, 0, {"a": nan}), Evaluated(0.0, 1, {"b": 1.0})]) is None
    best = of([Evaluated(0.0, 0, {"a": nan}), Evaluated(0.0, 1, {"a": 1.0}), Evaluated(0.0, 2, {"a": nan})])
    assert best is not None
    assert best.t == 1


def test_export_of_a_run_that_is_not_finished_says_so(tmp_path: Path) -> None:
    simulation = Simulation(TASK, Settings.of({**COMMON, "epochs": 30}), folder=tmp_path / "run")
    simulation.checkpoint()
    out = str(tmp_path / "x.safetensors")
    said = []
    for _ in range(2):
        result = CliRunner().invoke(main, ["export", str(tmp_path / "run"), out])
        assert result.exit_code == 2
        said.append(result.output)
        simulation.close()
    assert "is running, and a simulated run has no model before it is finished; wait for its end" in said[0]
    assert "is interrupted" in said[1]
    assert "the command that began it goes on with it" in said[1]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["epochs"] == 30
