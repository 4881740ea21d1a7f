"""How the worst-served devices do at the end of a simulated run, and that every device's contribution is counted."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import offbeat
from offbeat.core.layout import Model
from offbeat.protocol.contribution import weights_in_version
from offbeat.report import report
from offbeat.settings import Settings
from offbeat.sim.result_metrics import DEVICES_MAX, worst_devices
from offbeat.sim.run import Simulation
from tests.simulation.quadratic import Quadratic

COMMON: dict[str, Any] = {"executor": "inline", "epochs": 24, "seed": 2}


class HeldOut(Quadratic):
    """Device i measures how far the model is from its own centre; every fourth device holds out nothing."""

    def evaluate_on(self, model: Model, device: int) -> dict[str, float]:
        if device % 4 == 3:
            return {}
        away = abs(float(model["x"].mean(dtype="float64")) - self.centres[device])
        return {"error": away, "score": -away}


TASK = HeldOut([float(device) for device in range(24)], [0.5] * 24, size=8)


def run_of(task: Any = TASK, folder: Path | None = None, **settings: Any) -> offbeat.Run:
    return Simulation(task, Settings.of({**COMMON, **settings}), folder=folder).run()


def test_the_result_is_evaluated_on_every_device_that_holds_something_out(tmp_path: Path) -> None:
    run = run_of(folder=tmp_path / "run")
    measured = [found["error"] for device in range(24) if (found := TASK.evaluate_on(run.x, device))]
    worst = sorted(measured)[-2:]  # a tenth of 18 devices
    assert run.summary["devices_evaluated"] == len(measured) == 18
    assert run.summary["error_worst_tenth"] == pytest.approx(sum(worst) / 2)
    assert run.summary["score_worst_tenth"] == pytest.approx(-sum(worst) / 2)
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert "error, worst-served tenth of devices" in report(tmp_path / "run").read_text()


def test_nothing_is_said_where_devices_do_not_evaluate() -> None:
    summary = run_of(Quadratic([1.0] * 4, [0.5] * 4)).summary
    assert not [name for name in summary if name.endswith("_worst_tenth") or name == "devices_evaluated"]


def test_of_many_devices_some_are_chosen_evenly() -> None:
    asked: list[int] = []

    class Many(Quadratic):
        def evaluate_on(self, model: Model, device: int) -> dict[str, float]:  # noqa: ARG002
            asked.append(device)
            return {"error": float(device)}

    task = Many([1.0], [0.5])
    x = Model.of(task.initial(0))
    found = worst_devices(task, x, 4 * DEVICES_MAX)
    assert asked == list(range(0, 4 * DEVICES_MAX, 4))
    assert found["devices_evaluated"] == DEVICES_MAX
    assert found["error_worst_tenth"] == pytest.approx(sum(asked[-100:]) / 100)


def test_torch_tasks_evaluate_on_what_a_device_holds_out() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")

    import offbeat.torch

    def data(device: int) -> tuple[Any, Any]:
        x = torch.randn(40, 4, generator=torch.Generator().manual_seed(device))
        return x, (x[:, 0] > 0).long() if device else (x[:, 0] <= 0).long()  # device 0 sees it the other way round

    held_out = [data(device) for device in range(6)]
    task = offbeat.torch.Task(
        torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy, data, data(99), held_out=held_out, batch_size=10
    )
    run = run_of(task, devices=8)  # two of them hold out nothing
    assert run.summary["devices_evaluated"] == 6
    assert run.summary["accuracy_worst_tenth"] == task.evaluate_on(run.x, 0)["accuracy"] < run.summary["accuracy"]


# --- contribution ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    [
        {"rule": "fedasync"},
        {"rule": "fedbuff:3 + momentum:0.9"},
        {"rule": "fedavg:4 + adam:0.1"},
        {"rule": "ca2fl:3"},
        {"rule": "ace:0.1"},
        {"rule": "fedasync", "weights": "participation"},
        {"rule": "fedavg:4", "weights": "participation"},
    ],
)
def test_a_device_counts_what_its_updates_weigh_in_their_versions(method: dict[str, Any], tmp_path: Path) -> None:
    run, expected = run_of(folder=tmp_path / "run", **method), Counter[int]()
    version: list[tuple[int, float, float]] = []
    for decision in run.ledger:
        assert decision.mix is not None
        version.append((decision.lease.device, decision.mix.keep, decision.mix.new))
        if decision.mix.publish:
            for device, weight in weights_in_version(version):
                expected[device] += weight  # type: ignore[assignment]
            version = []
    assert {device: mass for device, (mass, _) in run.contribution.items()} == pytest.approx(expected)
    if method["rule"].startswith("fedavg"):
        assert sum(expected.values()) == pytest.approx(run.summary["t"])  # a version is a mean: the weights make 1
    rows = (tmp_path / "run" / "contribution.csv").read_text().splitlines()
    assert len(rows) == 1 + len(run.contribution)
