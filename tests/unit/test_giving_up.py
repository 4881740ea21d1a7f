"""A worker that is told to give up ends when its server cannot be reached, and leaves a finished update on the disk."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.errors import InvalidValue
from offbeat.worker.api_answers import Unreachable
from offbeat.worker.outbox import Outbox
from offbeat.worker.retrying import Backoff, Outages, ServerLost
from offbeat.worker.settings import WorkerSettings
from tests.unit.test_worker_loop import Case, Scripted, lease, refused

AWAY = Unreachable("nobody answers")
SOON_S = 0.05


class Away(list[Any]):
    """The server does not answer, however often it is tried."""

    def __bool__(self) -> bool:
        return True

    def pop(self, _index: Any = 0) -> Any:
        return AWAY


@pytest.mark.parametrize("verb", ["join", "ask", "push"])
def test_a_worker_gives_up_after_a_while(tmp_path: Path, verb: str) -> None:
    script: dict[str, Any] = {"ask": [lease()], verb: Away()}
    case = Case(tmp_path, Scripted(**script))
    with pytest.raises(ServerLost, match=r"could not be reached for 0\.05 s: nobody answers\. "):
        case.run(give_up_after=SOON_S)
    assert case.lines.count("nobody answers; trying again until it works") == 1


def test_one_that_gives_up_while_it_pulls_does_not_count_it_as_a_failed_training(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()], pull=[ServerLost("the server could not be reached for 1 s: away")]))
    with pytest.raises(ServerLost):
        case.run(give_up_after=1.0)
    assert not any("failed" in line for line in case.lines)


def test_a_finished_update_stays_and_is_pushed_when_the_worker_starts_again(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()], push=Away()))
    with pytest.raises(ServerLost, match=r"The update of task 3 stays in .*outbox; start again to push it\."):
        case.run(give_up_after=SOON_S)
    with Outbox(tmp_path / "outbox") as outbox:
        held = outbox.held()
        assert held is not None
        assert held.task == 3
    again = Case(tmp_path, Scripted()).run(give_up_after=SOON_S)
    assert again.calls[:2] == ["join 3", "push 3 resume"]


def outages(give_up_after: float | None) -> tuple[Outages, list[float]]:
    waits: list[float] = []
    return Outages(Backoff(5.0, 5.0, lambda: 1.0), waits.append, lambda _line: None, give_up_after), waits


def test_the_last_wait_is_no_longer_than_what_is_left() -> None:
    lost, waits = outages(2.0)
    lost.wait(AWAY)
    assert len(waits) == 1
    assert 0 < waits[0] <= 2.0


def test_a_server_that_answers_now_and_then_is_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [monotonic()]
    monkeypatch.setattr("offbeat.worker.retrying.monotonic", lambda: now[0])
    lost, _ = outages(10.0)
    answers: list[Callable[[], None]] = [lost.over, partial(lost.wait, refused(503, "not_now"))]
    for answer in answers:
        lost.wait(AWAY)
        now[0] += 9.0
        answer()
        now[0] += 9.0
    lost.wait(AWAY)
    now[0] += 10.0
    with pytest.raises(ServerLost):
        lost.wait(AWAY)


def test_without_a_limit_a_server_is_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("offbeat.worker.retrying.monotonic", lambda: now[0])
    lost, waits = outages(None)
    for _ in range(50):
        lost.wait(AWAY)
        now[0] += 1e6
    assert waits == [5.0] * 50


def test_the_command_ends_with_a_status_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text("task = None\n")
    flags = ["--server", "http://127.0.0.1:1", "--dir", str(tmp_path / "outbox"), "--give-up-after", "0.2"]
    found = CliRunner().invoke(main, ["work", str(file), *flags])
    assert found.exit_code == 4, found.output
    assert "could not be reached for 0.2 s" in found.output
    assert "Start the worker again when the server is back." in found.output
    assert "Traceback" not in found.output


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_it_is_a_number_of_seconds(seconds: float) -> None:
    with pytest.raises(InvalidValue, match=r"give_up_after is .* but must be a number of seconds > 0"):
        WorkerSettings(server="http://127.0.0.1:1", give_up_after=seconds)
