"""A run that is finished or interrupted goes on to another end, as if it had never been another one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offbeat
from offbeat.settings import Settings
from offbeat.sim import extending
from offbeat.sim.run import Simulation, StopRequested
from offbeat.storage.ledger import Ledger
from offbeat.storage.run_folder import RunFolder
from tests.simulation.quadratic import Quadratic

TASK = Quadratic([9.0, 8.0, 8.5, 9.5, 8.0, 9.0], [0.95] * 6, size=50, noise=0.05)
COMMON: dict[str, Any] = {"executor": "inline", "device_model": "lognormal:1", "evaluate_every": 7, "seed": 4}
METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {},
    "fair": {"scheduler": "fair", "in_flight_max": 3},
    "delta": {"rule": "delta"},
    "fedbuff": {"rule": "fedbuff:3"},
    "fedavg": {"rule": "fedavg:3"},
    "deadline": {"rule": "fedavg:3", "group_deadline_s": 1.0},
    "mixing": {"mix_s": 0.2, "queue_max": 4},
    "dropout": {"dropout": 0.2, "lease_s": 4.0},
    "reject": {"staleness_policy": "reject", "staleness_max": 1},
    "pace": {"staleness_policy": "pace", "staleness_max": 2, "pace_wait_s": 2.0},
    "available": {"availability": 0.7, "availability_period_s": 10.0},
    "intervals": {"trigger_every_s": 0.7},
}
OF_ENDS = ("finished", "extended", "truncated")
"""A run that finishes in the event that ends it has said so before it is extended; one that went back tells of it."""
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "epochs": ({"epochs": 20}, {"epochs": 50}),
    "gradients": ({"gradients": 20}, {"gradients": 50}),
    "target": ({"target": "x>=2", "epochs": 50}, {"target": "x>=100", "epochs": 50}),
}


def simulate(folder: Path, **settings: Any) -> offbeat.Run:
    return Simulation(TASK, Settings.of({**COMMON, **settings}), folder=folder).run()


def kinds(folder: Path) -> list[str]:
    with RunFolder.open(folder).ledger() as ledger:
        return [row.kind for row in ledger.rows()]


def contents(folder: Path) -> dict[str, Any]:
    with RunFolder.open(folder).ledger() as ledger:
        rows = list(ledger.rows())
    return {file.name: rows if file.name == "ledger.sqlite" else file.read_bytes() for file in folder.iterdir()}


def facts(run: offbeat.Run) -> tuple[Any, ...]:
    told = {
        name: value
        for name, value in run.summary.items()
        if name not in ("wall_s", "dir", "settings", "ended", "ledger_head")
    }
    return told, run.ledger, run.metrics, run.contribution


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("method", METHODS)
def test_an_extended_run_has_the_bits_of_one_long_run(method: str, end: str, tmp_path: Path) -> None:
    first, later = ENDS[end]
    short = simulate(tmp_path / "run", **METHODS[method], **first)
    extended = simulate(tmp_path / "run", **METHODS[method], **later)
    whole = simulate(tmp_path / "whole", **METHODS[method], **later)
    assert short.summary["t"] < extended.summary["t"]
    assert extended.summary["x_sha256"] == whole.summary["x_sha256"]
    assert facts(extended) == facts(whole)
    assert kinds(tmp_path / "run").count("extended") == 1
    told = [[kind for kind in kinds(tmp_path / name) if kind not in OF_ENDS] for name in ("run", "whole")]
    assert told[0] == told[1]
    assert json.loads((tmp_path / "run" / "settings.json").read_text())["epochs"] == first.get("epochs")


@pytest.mark.parametrize("method", ["fedasync", "fedbuff", "fedavg", "mixing", "dropout", "reject"])
def test_so_has_one_that_ended_by_its_clock(method: str, tmp_path: Path) -> None:
    simulate(tmp_path / "run", **METHODS[method], until_s=7.5)
    extended = simulate(tmp_path / "run", **METHODS[method], until_s=15.0)
    whole = simulate(tmp_path / "whole", **METHODS[method], until_s=15.0)
    assert facts(extended) == facts(whole)


def test_it_can_be_extended_again_and_interrupted_in_between(tmp_path: Path) -> None:
    simulate(tmp_path / "run", epochs=20)
    for end, stop in ((40, None), (60, 50), (60, None), (90, 70), (80, None)):
        if stop is None:
            simulate(tmp_path / "run", epochs=end)
            continue
        with pytest.raises(StopRequested):
            Simulation(TASK, Settings.of({**COMMON, "epochs": end}), folder=tmp_path / "run").run(_stopping_at(stop))
    whole = simulate(tmp_path / "whole", epochs=80)
    found = RunFolder.open(tmp_path / "run").summary
    assert found is not None
    assert (found["x_sha256"], found["epochs"]) == (whole.summary["x_sha256"], 80)
    assert kinds(tmp_path / "run").count("extended") == 4


def _stopping_at(t: int) -> Any:
    def look(simulation: Simulation) -> None:
        if simulation.coordinator.t >= t:
            raise StopRequested

    return look


def test_a_run_that_is_killed_while_it_ends_can_be_extended(tmp_path: Path) -> None:
    """The checkpoint of an ending run is that of the moment before its end."""
    simulation = Simulation(TASK, Settings.of({**COMMON, "epochs": 20, "mix_s": 0.3}), folder=tmp_path / "run")
    while not simulation.engine.ending:
        simulation.executor.finish(simulation.advance())
    for _ in range(3):
        simulation.executor.finish(simulation.engine.advance(handled_max=simulation.engine.handled + 1))
    simulation.checkpoint()
    simulation.close()
    extended = simulate(tmp_path / "run", epochs=50, mix_s=0.3)
    assert facts(extended) == facts(simulate(tmp_path / "whole", epochs=50, mix_s=0.3))


def test_while_it_goes_on_it_is_not_finished(tmp_path: Path) -> None:
    simulate(tmp_path, epochs=20)
    simulation = Simulation(TASK, Settings.of({**COMMON, "epochs": 50}), folder=tmp_path)
    assert RunFolder.open(tmp_path).state == "running"
    assert not (tmp_path / "x.safetensors").exists()
    assert simulation.extension == ["Going on from epoch 20 to 50 epochs (before: 20 epochs)."]
    simulation.close()
    assert RunFolder.open(tmp_path).state == "interrupted"


@pytest.mark.parametrize(
    ("began", "later", "said"),
    [
        ({"epochs": 20}, {"epochs": 20}, "finished run"),
        ({"epochs": 20}, {"epochs": 10}, "--epochs is 10, and the run has reached 20 epochs"),
        ({"epochs": 20}, {"epochs": 50, "gradients": 20}, "--gradients is 20, and the run has reached 20 gradients"),
        ({"until_s": 5.0}, {"until_s": 4.99}, "--until-s is 4.99, and the run has reached 5 s"),
        ({"target": "x>=2.5"}, {"target": "x>=2.2"}, "version .* has reached it"),
        ({"target": "x>=2.5"}, {"target": "accuracy>=0.5"}, "the task's metrics are x"),
        ({"epochs": 20}, {"epochs": 50, "alpha": 0.5}, "alpha is 0.6 there and 0.5 here"),
    ],
)
def test_an_end_that_is_reached_is_refused_and_nothing_changes(
    began: dict[str, Any], later: dict[str, Any], said: str, tmp_path: Path
) -> None:
    simulate(tmp_path, **began)
    before = contents(tmp_path)
    with pytest.raises(offbeat.OffbeatError, match=said):
        simulate(tmp_path, **later)
    assert contents(tmp_path) == before


def test_what_differs_from_one_long_run_is_said(tmp_path: Path) -> None:
    common = COMMON | {"evaluate_every": None, "alpha_schedule": "step:800,0.5"}
    Simulation(TASK, Settings.of({**common, "epochs": 100}), folder=tmp_path / "a").run()
    simulation = Simulation(TASK, Settings.of({**common, "epochs": 1000}), folder=tmp_path / "a")
    simulation.close()
    assert simulation.extension[1:] == [
        "Unlike in one long run, versions are evaluated every 1 epochs, as when the run began; "
        "one that began with this end would evaluate every 10.",
        "Unlike in one long run, alpha_schedule step:800,0.5 counts epochs from the beginning, and is not stretched.",
    ]


def test_sampled_staleness_goes_on_and_says_what_differs(tmp_path: Path) -> None:
    sampled = {"device_model": "sampled:4"}
    simulate(tmp_path / "run", epochs=20, **sampled)
    simulation = Simulation(TASK, Settings.of({**COMMON, **sampled, "epochs": 50}), folder=tmp_path / "run")
    run = simulation.run()
    assert run.summary["t"] == 50
    assert [d.t for d in run.ledger] == list(range(1, 51))
    assert "the first tasks after epoch 20 start from it" in simulation.extension[1]
    after = [d.staleness for d in run.ledger if d.t > 24]
    whole = simulate(tmp_path / "whole", epochs=50, **sampled)
    assert after == [d.staleness for d in whole.ledger if d.t > 24]


def test_what_would_take_too_much_room_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sim.run.END_BYTES_MAX", 1000)
    simulate(tmp_path, epochs=20)
    assert not (tmp_path / "checkpoint.safetensors").exists()
    with pytest.raises(offbeat.OffbeatError, match=r"kept no checkpoint.*run it anew"):
        simulate(tmp_path, epochs=50)
    assert RunFolder.open(tmp_path).state == "finished"


def test_a_finished_run_of_the_version_before_says_why_it_cannot(tmp_path: Path) -> None:
    simulate(tmp_path, epochs=20)
    (tmp_path / "checkpoint.safetensors").unlink()
    with pytest.raises(offbeat.OffbeatError, match="of an earlier version"):
        simulate(tmp_path, epochs=50)


def test_the_page_and_the_list_show_the_end_that_it_has_now(tmp_path: Path) -> None:
    from offbeat.cli.standing import from_files, run_of

    simulate(tmp_path, epochs=20)
    Simulation(TASK, Settings.of({**COMMON, "epochs": 50}), folder=tmp_path).close()
    assert run_of(tmp_path)["state"] == "interrupted"
    assert from_files(tmp_path)["epochs"] == 50
    simulate(tmp_path, epochs=50)
    assert run_of(tmp_path)["state"] == "finished"
    assert from_files(tmp_path)["t"] == 50


def test_extensions_read_back_as_they_were_told(tmp_path: Path) -> None:
    simulate(tmp_path, epochs=20)
    simulate(tmp_path, epochs=50, until_s=1000.0)
    with Ledger.open(tmp_path / "ledger.sqlite", read_only=True) as ledger:
        (event,) = extending.extensions_in(ledger)
    assert (event.epochs, event.gradients, event.until_s, event.target) == (50, None, 1000.0, None)
    assert np.isfinite(event.at)
