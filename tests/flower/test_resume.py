"""A run on Flower that is killed, at any event and any file, goes on: nothing mixed is lost, or mixed twice."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from flwr.common.constant import ErrorCode

from offbeat.cli import main
from offbeat.core.kernel import Term, Updater
from offbeat.core.layout import aligned
from offbeat.core.rules import Facts, Mix, Rule, from_spec
from offbeat.core.staleness import polynomial
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.flower.flower_run import FlowerRun
from offbeat.protocol.coordinator import Coordinator
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from tests.flower.fake import X_0, FakeGrid, Node, error, one_file, pushed, start

pytestmark = pytest.mark.slow

EPOCHS = 8
KILLED = 77


def fleet() -> FakeGrid:
    return FakeGrid({3: Node(1.0), 8: Node(2.5), 5: Node(4.0, leaves_at=9.0), 4: Node(1.25, joins_at=2.0)})


def go(folder: Path, rule: str = "fedasync", **options: Any) -> Any:
    """Run on a fresh Grid, as a new run of Flower's has it; every evaluation is noted in a file beside the folder."""

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
        with folder.with_suffix(".seen").open("a") as file:
            file.write(f"{t}\n")
        return MetricRecord({"count": float(arrays["n"].numpy())})

    grid = fleet()
    push = grid.push_messages

    def noted(messages: Any) -> list[str]:
        names = push(messages)
        with folder.with_suffix(".pushed").open("a") as file:
            file.writelines(f"{int(message.content['config']['server-round']) - 1}\n" for message in messages)
        return names

    grid.push_messages = noted  # type: ignore[method-assign]
    made = {"epochs": EPOCHS, "evaluate_every": 1, "alpha": 0.6} | options
    return start(grid, rule, dir=folder, evaluate_fn=evaluate, **made)


def killed_at(folder: Path, count: int, where: tuple[type, str], rule: str) -> bool:
    """Run in a process that dies, as by SIGKILL, at the count-th call of a function; false where it came to its end."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    owner, name = where
    function: Callable[..., Any] = getattr(owner, name)
    calls = [0]

    def counted(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == count:
            os._exit(KILLED)
        return function(*arguments, **named)

    setattr(owner, name, counted)
    try:
        go(folder, rule)
    finally:
        os._exit(0)


def noted(folder: Path, what: str) -> list[int]:
    """The versions that were evaluated (`seen`) or sent out (`pushed`), so far."""
    file = folder.with_suffix(f".{what}")
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def kept(folder: Path) -> int:
    """The version of the newest checkpoint."""
    files = sorted((folder / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    return int(json.loads(files[-1].read_text())["state"]["t"]) if files else 0


def standing(folder: Path) -> int:
    """The newest version that the ledger knows of."""
    if not (folder / "ledger.sqlite").exists():
        return 0
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        return max((row.t or 0 for row in ledger.rows("published")), default=0)


def replayed(history: list[Any]) -> Any:
    """x_t from x_0 and the history alone: every update once, in its order, from the version that it says."""
    oracle = one_file()
    versions = [X_0]
    for applied in history:
        s = oracle.polynomial(0.5)
        x, alpha_t = oracle.updater(
            versions[-1], pushed(versions[applied.tau], applied.node), applied.tau, applied.t, 0.6, s
        )
        assert alpha_t == applied.alpha_t
        versions.append(x)
    return versions[-1]


POINTS = [
    *((Coordinator, "handle", count) for count in (1, 2, 3, 7, 11, 12, 13, 14, 15, 16, 17, 25, 30, 31, 32, 33, 40)),
    *((Disk, "replace", count) for count in (1, 2, 3, 4, 5, 8, 9, 14, 15)),
    *((Disk, "sync_folder", count) for count in (2, 3, 6)),
    *((Ledger, "_write", count) for count in (1, 2, 5, 9)),
    *((FlowerRun, "_mix", count) for count in (1, 4)),
    *((FakeGrid, "pull_messages", count) for count in (1, 9, 20)),
    *((FakeGrid, "push_messages", count) for count in (1, 4, 7)),
]


@pytest.mark.parametrize(("owner", "name", "count"), POINTS, ids=lambda part: getattr(part, "__name__", str(part)))
def test_a_run_that_was_killed_anywhere_goes_on(owner: type, name: str, count: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, count, (owner, name), "fedasync"), "it was to die on the way"
    before, seen = standing(folder), noted(folder, "seen")
    assert kept(folder) >= max(noted(folder, "pushed"), default=0), "nobody trains on what a kill could take back"
    result = go(folder)
    assert [applied.t for applied in result.history] == list(range(1, EPOCHS + 1))
    assert result.arrays["x"].numpy().tobytes() == replayed(result.history).tobytes()
    again = noted(folder, "seen")[len(seen) :]
    assert max(seen, default=0) <= again[0] <= before + 1, "what was evaluated stays mixed"
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert [evaluation.t for evaluation in ledger.evaluations()] == list(range(EPOCHS + 1))
        leased = [row.task for row in ledger.rows("leased")]
        assert len(leased) == len(set(leased)), "what was taken back is not in the ledger either"


def test_killed_again_and_again_it_still_ends(tmp_path: Path) -> None:
    folder, kills = tmp_path / "run", 0
    while killed_at(folder, 45, (Coordinator, "handle"), "fedasync"):
        kills += 1
        assert kills < 20
    assert kills >= 1
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert [row.t for row in ledger.rows("published")] == list(range(1, EPOCHS + 1))
        assert len({row.task for row in ledger.rows("decided")}) == EPOCHS


def test_fewer_checkpoints_lose_at_most_what_came_after_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    child = os.fork()
    if not child:

        def evaluate(t: int, _arrays: Any) -> None:
            if t == 7:
                os._exit(KILLED)

        try:
            start(fleet(), dir=folder, epochs=EPOCHS, evaluate_every=1, checkpoint_every=3, evaluate_fn=evaluate)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    seen: list[int] = []
    start(
        fleet(),
        dir=folder,
        epochs=EPOCHS,
        evaluate_every=1,
        checkpoint_every=3,
        evaluate_fn=lambda t, _: seen.append(t),
    )
    assert seen == [6, 7, 8]


def replayed_by(rule: Rule, history: list[Any]) -> Any:
    """x_t by the rule and the kernel alone, from the history."""
    w, memory, versions = X_0, rule.memory, [X_0]
    with Updater() as updater:
        for applied in history:
            x_tau = versions[applied.tau]
            mix, memory = rule.decide(Facts(applied.t, applied.tau, 0, 10), memory)
            assert isinstance(mix, Mix)
            out = aligned(len(w))
            updater.mix(out, w, [Term(mix, pushed(x_tau, applied.node), x_tau)])
            w = out
            versions += [w] if mix.publish else []
    return versions[-1]


@pytest.mark.parametrize("count", [24, 27, 30])
@pytest.mark.parametrize("rule", ["fedbuff:3", "delta", "fedavg:2"])
def test_other_rules_go_on_with_their_memory(rule: str, count: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, count, (Coordinator, "handle"), rule)
    result = go(folder, rule)
    k = int(rule.partition(":")[2] or 1)
    assert [applied.t for applied in result.history] == [t for t in range(1, EPOCHS + 1) for _ in range(k)]
    x = replayed_by(from_spec(rule, 0.6, polynomial(0.5)), result.history)
    assert result.arrays["x"].numpy().tobytes() == x.tobytes()


def test_a_resumed_run_gives_out_no_lease_twice_and_knows_its_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, 30, (Coordinator, "handle"), "fedasync")
    go(folder)
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        leased = [row.task for row in ledger.rows("leased")]
        assert len(leased) == len(set(leased))
        assert ledger.count("restarted") == 1
        names = {row.worker: str(row.detail) for row in ledger.rows("joined")}
    assert sorted(names.values()) == [f'{{"name": "{node}"}}' for node in (3, 4, 5, 8)], "a node is one worker for ever"


def test_a_node_keeps_its_number_whoever_comes_before_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, 30, (Coordinator, "handle"), "fedasync")
    others = FakeGrid({1: Node(1.0), 8: Node(1.5), 9: Node(2.25)})
    result = start(others, dir=folder, epochs=EPOCHS, evaluate_every=1, alpha=0.6)
    assert {applied.node for applied in result.history} > {1, 3, 8}
    assert result.arrays["x"].numpy().tobytes() == replayed(result.history).tobytes()


def test_whoever_was_quarantined_may_try_again_with_a_new_app(tmp_path: Path) -> None:
    def broken(message: Message, _node: int) -> Message:
        return error(message, ErrorCode.CLIENT_APP_RAISED_EXCEPTION)

    def fail(t: int, _arrays: ArrayRecord) -> None:
        if t == 10:
            raise RuntimeError("somebody stops it")

    options: dict[str, Any] = {"dir": tmp_path / "run", "epochs": 20, "evaluate_every": 1}
    with pytest.raises(RuntimeError, match="somebody stops it"):
        start(FakeGrid({1: Node(answer=broken), 2: Node()}), evaluate_fn=fail, **options)
    result = start(FakeGrid({1: Node(), 2: Node()}), **options)
    assert [applied.t for applied in result.history] == list(range(1, 21))
    assert {applied.node for applied in result.history[:10]} == {2}
    assert {applied.node for applied in result.history[10:]} == {1, 2}


def test_a_folder_is_of_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, 20, (Coordinator, "handle"), "fedasync")
    with pytest.raises(InvalidValue, match=r"alpha is 0\.6 there and 0\.9 here"):
        go(folder, alpha=0.9)
    other = ArrayRecord({"y": Array(np.zeros(9, np.float32))})
    with pytest.raises(InvalidValue, match="layout is"):
        start(fleet(), dir=folder, arrays=other, epochs=EPOCHS, evaluate_every=1, alpha=0.6)
    go(folder)
    with pytest.raises(InvalidValue, match="finished run"):
        go(folder)


def test_a_damaged_checkpoint_costs_time_and_two_are_not_begun_over(tmp_path: Path) -> None:
    for name, damaged in (("one", 1), ("both", 2)):
        folder = tmp_path / name
        assert killed_at(folder, 30, (Coordinator, "handle"), "fedasync")
        t, files = standing(folder), sorted((folder / "checkpoints").glob("*.json"), key=lambda file: -int(file.stem))
        for file in files[:damaged]:
            file.write_text("{")
        if damaged == 2:
            with pytest.raises(OffbeatError, match="no checkpoint that can be read"):
                go(folder)
            assert standing(folder) == t
        else:
            result = go(folder)
            assert result.arrays["x"].numpy().tobytes() == replayed(result.history).tobytes()


def test_our_commands_read_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert killed_at(folder, 30, (Coordinator, "handle"), "fedasync")
    said = CliRunner().invoke(main, ["status", str(folder)]).output
    assert "flower (interrupted)" in said
    go(folder)
    said = CliRunner().invoke(main, ["status", str(folder)]).output
    assert "flower (finished: 8 epochs)" in said
    assert f"epoch       {EPOCHS} of {EPOCHS}; {EPOCHS} updates mixed" in said
    assert "staleness   mean" in said
    report = CliRunner().invoke(main, ["report", str(folder), str(tmp_path / "report.html")])
    assert report.exit_code == 0, report.output
    assert "flower" in (tmp_path / "report.html").read_text()
    export = CliRunner().invoke(main, ["export", str(folder), str(tmp_path / "x.safetensors")])
    assert export.exit_code == 0, export.output
    assert not (folder / "checkpoints").exists()


def test_a_backup_goes_on_as_a_fork_beside_the_original(tmp_path: Path) -> None:
    folder, out = tmp_path / "run", tmp_path / "out"
    assert killed_at(folder, 30, (Coordinator, "handle"), "fedasync")
    made = CliRunner().invoke(main, ["backup", str(folder), str(out)])
    assert made.exit_code == 0, made.output
    for path, forks in ((folder, 0), (out, 1)):
        assert int(go(path).arrays["n"].numpy()) > 0
        verified = CliRunner().invoke(main, ["verify", str(path), "--json"])
        assert verified.exit_code == 0, verified.output
        assert len(json.loads(verified.output)["forks"]) == forks
    assert not (out / "backup.json").exists()
