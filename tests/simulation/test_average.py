"""Simulated: the averaged model is what its formula says under every rule, is evaluated, kept, resumed and compared."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

import offbeat
from offbeat.cli import main
from offbeat.core.rules import average_from_spec
from offbeat.errors import InvalidValue
from offbeat.server.verify import verify
from offbeat.settings import Settings
from offbeat.sim.compare import compare
from offbeat.sim.run import Simulation
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import read_json
from tests.simulation.comparing import change, written
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([9.0, 8.0, 8.5, 9.5, 8.0, 9.0], [0.5] * 6, size=5000, noise=0.05)
COMMON: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "evaluate_every": 1, "seed": 4}
RULES = ["fedasync", "delta", "fedbuff:3", "fedavg:3", "fedbuff:2 + momentum:0.5", "ca2fl:2", "ace:0.1"]


def run_of(folder: Path | None = None, task: Any = TASK, **settings: Any) -> offbeat.Run:
    return Simulation(task, Settings.of({**COMMON, "epochs": 12, **settings}), folder=folder).run()


def expected(spec: str, values: list[float]) -> list[float]:
    """The mean of the versions, worked out from a metric that is linear in the model."""
    average, mean, means = average_from_spec(spec), values[0], [values[0]]
    assert average is not None
    for t, value in enumerate(values[1:], 1):
        mean += average.share(t) * (value - mean)
        means.append(mean)
    return means


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("spec", ["poly:0", "poly:8", "ema:0.2"])
def test_it_is_what_its_formula_says_under_every_rule(rule: str, spec: str) -> None:
    run, without = run_of(rule=rule, average=spec), run_of(rule=rule)
    values = [point.metrics["x"] for point in run.metrics]
    means = [point.metrics["x_average"] for point in run.metrics]
    assert [point.t for point in run.metrics] == list(range(13))
    np.testing.assert_allclose(means, expected(spec, values), rtol=1e-5)
    assert run.average is not None
    assert (run.summary["x_average"], run.summary["average_t"]) == (means[-1], 12)
    assert run.summary["x_sha256"] == without.summary["x_sha256"]  # workers train from x_t as before
    assert without.average is None
    assert "x_average" not in without.summary


@pytest.mark.parametrize("rule", ["fedasync", "fedbuff:2 + momentum:0.5"])
def test_an_interrupted_run_has_the_same_one_to_the_last_bit(rule: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rule": rule, "average": "poly:8", "mix_s": 0.1}
    whole = run_of(**settings)
    for events in (1, 9, 17):
        folder = tmp_path / str(events)
        simulation = Simulation(TASK, Settings.of({**COMMON, "epochs": 12, **settings}), folder=folder)
        for _ in range(events):
            simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 1))
        simulation.checkpoint()
        simulation.close()
        resumed = run_of(folder, **settings)
        assert whole.average is not None
        assert resumed.average is not None
        assert resumed.average.vector.tobytes() == whole.average.vector.tobytes()
        assert [point.metrics for point in resumed.metrics] == [point.metrics for point in whole.metrics]


def test_it_is_that_of_the_version_which_reached_the_target_over_an_interruption_too(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"average": "ema:0.5", "target": "x_average>=4", "mix_s": 0.2, "epochs": None}
    simulation = Simulation(TASK, Settings.of({**COMMON, **settings}), folder=tmp_path / "run")
    while not simulation.coordinator.end_reason:
        simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 1))
    simulation.checkpoint()
    simulation.close()
    resumed, whole = run_of(tmp_path / "run", **settings), run_of(**settings)
    summary = resumed.summary
    assert summary["result_t"] == summary["average_t"] < summary["t"]
    assert summary["x_average"] >= 4
    for run in (resumed, whole):
        assert run.average is not None
        assert float(run.average["x"].mean(dtype="float64")) == summary["x_average"] == whole.summary["x_average"]
    assert verify(tmp_path / "run")["agrees"]


def test_it_is_in_the_folder_and_exported(tmp_path: Path) -> None:
    run, out = run_of(tmp_path / "run", average="poly:8"), tmp_path / "out.safetensors"
    assert run.average is not None
    for more in ((), ("--epoch", "latest"), ("--epoch", "12")):
        result = CliRunner().invoke(main, ["export", str(tmp_path / "run"), str(out), "--average", *more])
        assert result.output == f"Wrote the averaged model up to version 12 to {out}\n"
        assert load_file(out)["x"].tobytes() == run.average.vector.tobytes()
    result = CliRunner().invoke(main, ["export", str(tmp_path / "run"), str(out), "--average", "--epoch", "3"])
    assert result.exit_code == 2
    assert "leave out --epoch 3" in result.output
    file = tmp_path / "run" / "average.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x00")
    assert any("average.safetensors is not the file" in said for said in verify(tmp_path / "run")["wrong"])


def test_an_unfinished_run_and_one_without_it_say_why_there_is_none(tmp_path: Path) -> None:
    run_of(tmp_path / "without")
    simulation = Simulation(TASK, Settings.of({**COMMON, "epochs": 9, "average": "poly:8"}), folder=tmp_path / "begun")
    simulation.checkpoint()
    simulation.close()
    for name, why in {"without": "was not run with --average", "begun": "no model before it is finished"}.items():
        result = CliRunner().invoke(
            main, ["export", str(tmp_path / name), str(tmp_path / "o.safetensors"), "--average"]
        )
        assert result.exit_code == 2
        assert why in result.output


def test_a_longer_run_goes_on_with_it(tmp_path: Path) -> None:
    short, whole = run_of(tmp_path / "run", average="poly:2", epochs=6), run_of(average="poly:2", epochs=12)
    longer = run_of(tmp_path / "run", average="poly:2", epochs=12)
    assert short.average is not None
    assert longer.average is not None
    assert whole.average is not None
    assert longer.average.vector.tobytes() == whole.average.vector.tobytes() != short.average.vector.tobytes()
    assert verify(tmp_path / "run")["agrees"]


class Named(Quadratic):
    def evaluate(self, model: Any) -> dict[str, float]:
        return {"x": 1.0, "own_average": float(model["x"].mean())}


def test_names_that_would_mean_two_things_are_refused() -> None:
    task = Named([1.0] * 3, [0.5] * 3)
    with pytest.raises(InvalidValue, match="names that end in _average are for the averaged model"):
        run_of(task=task, average="poly:8")
    with pytest.raises(InvalidValue, match="what is kept are versions, not averaged models"):
        run_of(average="poly:8", keep_best="x_average")
    assert run_of(task=task, keep_best="own_average").summary["best_t"] >= 0  # without an average, any name will do


def test_a_comparison_has_a_column_for_it(tmp_path: Path) -> None:
    spec = written(tmp_path)
    plain = compare(Spec.read(spec), tmp_path / "plain", processes=1)
    assert "x_average" not in plain.table
    change(spec, ("[methods.fast]", '[methods.fast]\naverage = "poly:8"'))
    result = compare(Spec.read(spec), tmp_path / "out", processes=1)
    heading, *lines = result.table.splitlines()
    assert heading.split()[:4] == ["method", "seeds", "x", "x_average"]
    fast, slow = result.rows()
    finals = [curve[-1].metrics["x_average"] for curve in result.curves["fast"]]
    assert fast.average == pytest.approx(np.mean(finals))
    assert slow.average is None
    assert f"{fast.average:.4f}" in lines[0]


def test_the_command_says_it_beside_the_metric(tmp_path: Path) -> None:
    written(tmp_path)
    command = ["simulate", str(tmp_path / "pull.py"), "--epochs", "9", "--average", "poly:0", "--executor", "inline"]
    result = CliRunner().invoke(main, [*command, "--dir", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    summary = read_json(tmp_path / "run" / "summary.json")
    said = f"x           {summary['x']:.4f}, averaged model {summary['x_average']:.4f}"
    assert said in result.output.splitlines()
    status = CliRunner().invoke(main, ["status", str(tmp_path / "run")]).output
    assert f"x {summary['x']:.4g}, averaged model {summary['x_average']:.4g} (epoch 9)" in status
    assert "averaged" in CliRunner().invoke(main, ["runs", str(tmp_path)]).output
