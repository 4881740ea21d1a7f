"""Served runs, of this version and of the one before, are decided again from their lasting rows."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offbeat.hosting.task_host import TaskDescription
from offbeat.method import Method
from offbeat.server.folder import served_method
from offbeat.settings import Settings
from offbeat.storage.leading import UNKNOWN_TO_THE_UNCHAINED, LedThrough, lead
from offbeat.storage.ledger import CHATTER, NO_ROW, Ledger
from tests.golden.old_runs import recorded_settings
from tests.golden.test_old_runs import SERVED, some
from tests.server.serving import Running, Worker, packed, serving
from tests.server.speaking import until

METHODS: dict[str, dict[str, Any]] = {
    "fedasync": {"rule": "fedasync", "alpha": 0.7, "staleness_fn": "polynomial:0.5"},
    "hinge": {"staleness_fn": "hinge:1,2", "scheduler": "fair"},
    "reject": {"staleness_policy": "reject", "staleness_max": 1},
    "pace": {"staleness_policy": "pace", "staleness_max": 6, "pace_wait_s": 0.3},
    "fedbuff": {"rule": "fedbuff:3"},
    "delta": {"rule": "delta", "alpha": 0.4},
    "fedavg": {"rule": "fedavg:3"},
    "deadline": {"rule": "fedavg:6", "group_deadline_s": 0.3},
    "gate": {"norm_median_max": 3.0},
    "intervals": {"trigger_every_s": 0.05},
    "silence": {"silent_s": 0.2, "lease_s": 5.0},
}
QUICK = ("fedasync", "deadline", "delta")
"""Run with all tests; the others with the slow ones."""
COMMON = {"devices": 8, "in_flight_max": 5, "bad_updates_max": 2, "evaluate_every": 2, "seed": 3}
LIMITS = {"checkpoint_every": 4, "poll_s": 0.05}


def method_in(folder: Path) -> Method:
    facts = json.loads((folder / "run.json").read_text())
    about = TaskDescription(**{**facts["about"], "metrics": tuple(facts["about"]["metrics"])})
    return served_method(Settings.of(recorded_settings(folder)), about, facts.get("silent_s"), facts.get("queue_max"))


def led_in(folder: Path, change: Callable[[Method], Method] = lambda method: method) -> LedThrough:
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return lead(ledger, change(method_in(folder)).led())


def lived(running: Running, names: str) -> None:
    """Workers come, work, hand back, lie, fall silent, push late and twice, and go."""
    workers = [Worker(running, f"{name}", device=number) for number, name in enumerate(names)]
    first, second, liar, silent, leaver, *others = workers
    for turn in range(4):
        for worker in (first, second, *others):
            answer = worker.ask(0.2)
            if answer.get("state") == "working":
                task = answer["lease"]["task"]
                data = packed(worker.pull({"model": "/v1/models/latest"}))
                worker.push(task, data)
                worker.push(task, data)
        handed_back(running, leaver)
        if turn == 1:
            bad(liar)
            held = silent.ask(0.2)
            running.call("POST", "/v1/pause", {})
            first.ask(0.1)
            running.call("DELETE", "/v1/pause")
    if held.get("state") == "working":
        task = held["lease"]["task"]
        running.call("POST", f"/v1/tasks/{task}/heartbeat", {}, silent.session)
        silent.push(task, packed(silent.pull({"model": "/v1/models/latest"})))
    running.call("DELETE", f"/v1/workers/{leaver.number}", headers=leaver.session)


def bad(liar: Worker) -> None:
    for _ in range(3):
        answer = liar.ask(0.2)
        if answer.get("state") == "working":
            model = liar.pull({"model": "/v1/models/latest"}).copy()
            model.vector[:] = float("nan")
            liar.push(answer["lease"]["task"], packed(model))


def handed_back(running: Running, leaver: Worker) -> None:
    answer = leaver.ask(0.2)
    if answer.get("state") == "working":
        running.call("DELETE", f"/v1/tasks/{answer['lease']['task']}", headers=leaver.session)


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS])
def test_a_served_run_is_decided_again(name: str, tmp_path: Path) -> None:
    settings = {**COMMON, **METHODS[name]}
    for names in ("abcdefgh", "ijklmnop"):
        with serving(tmp_path, settings, LIMITS) as running:
            lived(running, names)
            until(lambda: running.server.run.coordinator.queued, lambda queued: not queued)
    with Ledger.open(tmp_path / "run" / "ledger.sqlite") as ledger:
        while ledger.forget_chatter(NO_ROW):
            pass
        kinds = {row.kind for row in ledger.rows()}
        decisions = ledger.count("decided")
    led = led_in(tmp_path / "run")
    assert (led.differences, led.lacks) == ([], [])
    assert led.decisions == decisions >= 5
    assert {"quarantined", "repeated", "left", "returned", "run_paused", "restarted", "mixed"} <= kinds
    assert not kinds & set(CHATTER)


def test_another_alpha_is_found(tmp_path: Path) -> None:
    with serving(tmp_path, {"alpha": 0.7, **COMMON}) as running:
        assert Worker(running).work().status == 200

    def changed(method: Method) -> Method:
        return replace(method, rule=served_method(Settings.of({"alpha": 0.5}), about_of(method), None).rule)

    def about_of(_method: Method) -> TaskDescription:
        facts = json.loads((tmp_path / "run" / "run.json").read_text())["about"]
        return TaskDescription(**{**facts, "metrics": tuple(facts["metrics"])})

    (difference,) = led_in(tmp_path / "run", changed).differences
    assert "(decided): keep was 0.3" in difference


@some(SERVED)
def test_a_run_of_the_version_before_is_decided_again_and_says_what_it_lacks(run: Path) -> None:
    led = led_in(run)
    assert led.differences == []
    assert led.decisions > 0
    assert led.lacks == list(UNKNOWN_TO_THE_UNCHAINED)
