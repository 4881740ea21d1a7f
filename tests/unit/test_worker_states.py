"""The state of a worker's device follows the server's decisions, whenever the worker is killed or loses power."""

import errno
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Array, Layout, Model
from offbeat.digests import SHA256
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.storage.disk import Disk, Output
from offbeat.task import DeviceState, Trained, Work
from offbeat.wire import unpack
from offbeat.worker.api_answers import Acknowledgement, AskAnswer, Joined, LeasedTask
from offbeat.worker.api_client import ApiClient, OwnModel
from offbeat.worker.download import Patience
from offbeat.worker.kept_states import STATES_MAX
from offbeat.worker.loop import GaveUp, Worker
from offbeat.worker.outbox import Finished, Outbox, OutboxFull
from offbeat.worker.retrying import Backoff
from offbeat.worker.settings import WorkerSettings
from tests.contract.forgetful import Forgetful, Image, restore
from tests.unit.test_worker_loop import FINISHED, Beats, Unconnected, X, joined, refused

DEVICE = 2


class Counting:
    """Every update tells how many updates its device remembers, itself included."""

    keeps_state = True

    def initial(self, seed: int) -> Mapping[str, Array]:  # noqa: ARG002
        return X

    def train(self, model: Model, work: Work, state: DeviceState) -> tuple[Trained, Mapping[str, Array]]:  # noqa: ARG002
        count = state.get("count", np.array(0)) + 1
        model.vector[:] = count
        return Trained(50, 6), {"count": count}

    def evaluate(self, model: Model) -> Mapping[str, float]:  # noqa: ARG002
        return {}


class Deciding(Unconnected):
    """A server that decides on every task once, and gives the same answer again."""

    def __init__(self, bad: frozenset[int] = frozenset(), until: int = 6, run: str = "r1") -> None:
        super().__init__()
        self.bad, self.until, self.name = bad, until, run
        self.decided: dict[int, float | None] = {}
        """What the update of a task told; None where it was refused."""
        self.after_decision: Callable[[], None] = lambda: None

    @property
    def applied(self) -> list[float]:
        return [told for told in self.decided.values() if told is not None]

    @property
    def session(self) -> str:
        return "5-a"

    def beside(self) -> ApiClient:
        return Beats()

    def join(self, holding: int | None = None) -> Joined:  # noqa: ARG002
        return joined(run=self.name)

    def declare(self, own: OwnModel) -> None: ...

    def leave(self) -> None: ...

    def hand_back(self, task: int) -> None: ...

    def ask(self) -> AskAnswer:
        if len(self.decided) >= self.until:
            return FINISHED
        return AskAnswer("working", LeasedTask(len(self.decided), DEVICE, 4, 7, 1, "/v1/models/7", None))

    def pull(self, lease: LeasedTask, layout: Layout, patience: Patience) -> Model:  # noqa: ARG002
        return X.copy()

    def push(self, finished: Finished, *, resume: bool = False) -> Acknowledgement:  # noqa: ARG002
        repeated = finished.task in self.decided
        if not repeated:
            told = float(unpack(finished.path.read_bytes(), X.layout).vector[0])
            self.decided[finished.task] = None if finished.task in self.bad else told
        self.after_decision()
        if finished.task in self.bad:
            raise refused(409, "too_stale")
        return Acknowledgement(finished.task, "applied", 9, 7, 1, 0.4, repeated)


def work(outbox: Outbox, server: Deciding) -> list[str]:
    lines: list[str] = []
    task: Any = Counting()
    Worker(
        server,
        outbox,
        lambda _joined: task,
        WorkerSettings(server="http://127.0.0.1:1", failures_max=1),
        backoff=lambda: Backoff(0.001, 0.001, random.Random(1).random),  # noqa: S311 (jitter)
        say=lines.append,
        describe=str,
    ).run()
    return lines


def count(state: DeviceState) -> int:
    return int(state.get("count", np.array(0)))


# --- killed at any moment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["killed", "power cut", "power cut that keeps names"])
@pytest.mark.parametrize("bad", [frozenset[int](), frozenset({0})])
def test_whenever_the_worker_dies_its_device_remembers_what_was_applied(
    bad: frozenset[int], end: str, tmp_path: Path
) -> None:
    """Every update counts those applied before it: a state ahead of them skips a number, one behind repeats it."""
    life, seen, server = tmp_path / "life", list[tuple[Image, dict[int, float | None]]](), Deciding(bad, until=3)

    def passed(image: Image) -> None:
        left = files_in(life) if end == "killed" else image
        if (left, server.decided) not in seen:
            seen.append((left, dict(server.decided)))

    life.mkdir()
    disk = Forgetful(life, keeps_names=end != "power cut", moment=passed)
    server.after_decision = lambda: passed(disk.image())
    with Outbox(life, disk) as outbox:
        work(outbox, server)
    assert server.applied == list(range(1, 4 - len(bad)))
    assert len(seen) > 10
    for number, (left, decided) in enumerate(seen):
        again = Deciding(bad, until=4)
        again.decided = dict(decided)
        restore(left, tmp_path / str(number))
        with Outbox(tmp_path / str(number)) as outbox:
            lines = work(outbox, again)
            assert again.applied == list(range(1, 5 - len(bad))), f"after operation {number}"
            assert count(outbox.state_of("r1", DEVICE)) == len(again.applied)
            assert outbox.held() is None
        assert not any("removed" in line for line in lines), f"after operation {number}"


def files_in(folder: Path) -> Image:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.suffix != ".lock"}


def test_the_files_of_a_worker_that_is_done(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox") as outbox:
        work(outbox, Deciding(frozenset({5})))
    assert {file.name for file in outbox.path.iterdir()} == {"worker.json", "r1-2.state"}


def test_the_state_of_a_run_stays_while_there_is_another(tmp_path: Path) -> None:
    for run, until, first in (("r1", 2, 1), ("r2", 3, 1), ("r1", 1, 3)):
        server = Deciding(until=until, run=run)
        with Outbox(tmp_path / "outbox") as outbox:
            work(outbox, server)
        assert server.applied == list(range(first, first + until))


def test_an_update_of_another_run_goes_with_the_state_that_it_brought(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox") as outbox:
        keep(outbox, 0, 1, run="r0")
        work(outbox, Deciding(until=0))
        assert outbox.state_of("r0", DEVICE).number == 0
    assert {file.name for file in outbox.path.iterdir()} == {"worker.json"}


# --- the files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox(tmp_path / "outbox") as opened:
        yield opened


def keep(outbox: Outbox, task: int, number: int, run: str = "r1", device: int = DEVICE) -> Finished:
    state = DeviceState({"count": np.array(number)}, number)
    return outbox.keep(run, task, X, Trained(50, 6), device=device, state=state)


def test_a_state_is_committed_once(outbox: Outbox) -> None:
    first = keep(outbox, 3, 1)
    assert (first.device, first.state) == (DEVICE, 1)
    assert outbox.state_of("r1", DEVICE).number == 0
    for _ in range(2):
        outbox.commit(first)
        assert outbox.state_of("r1", DEVICE).number == 1
    assert outbox.held() == first
    outbox.drop(first)
    assert (outbox.state_of("r1", DEVICE).number, outbox.state_of("r1", 9).number) == (1, 0)


def test_what_is_dropped_or_replaced_takes_its_state_along(outbox: Outbox) -> None:
    for finished in (keep(outbox, 3, 1), keep(outbox, 3, 1), keep(outbox, 4, 1)):
        last = finished
    assert len(list(outbox.path.glob("*.brought"))) == 1
    outbox.drop(last)
    assert list(outbox.path.glob("*.brought")) == []
    assert outbox.state_of("r1", DEVICE).number == 0


def test_an_update_with_another_digest_keeps_its_state(outbox: Outbox) -> None:
    again = outbox.redigested(keep(outbox, 3, 1), SHA256)
    assert outbox.held() == again
    assert again.state == 1


def test_a_state_that_is_damaged_before_its_update_is_sent_takes_the_update_along(outbox: Outbox) -> None:
    """The old state stays, and the server leases another task: better than an update without what it learnt."""
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:-1]), Path.unlink):
        finished = keep(outbox, 3, 1)
        damage(finished.path.with_suffix(".brought"))
        assert outbox.held() is None
        assert "was removed, for the state that came with it is damaged" in outbox.damages.pop()
        assert {file.name for file in outbox.path.iterdir()} == {"worker.json", "worker.lock"}


@pytest.mark.parametrize("content", [b"", b"no file of ours", None])
def test_a_damaged_state_is_lost_and_that_is_said(content: bytes | None, outbox: Outbox) -> None:
    finished = keep(outbox, 3, 1)
    outbox.commit(finished)
    outbox.drop(finished)
    file = outbox.path / "r1-2.state"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if content is None else content)
    server = Deciding(until=1)
    assert any("r1-2.state is damaged and was removed" in line for line in work(outbox, server))
    assert server.applied == [1]


def test_a_state_that_cannot_be_read_is_not_thrown_away(outbox: Outbox) -> None:
    (outbox.path / "r1-2.state").mkdir()
    with pytest.raises(OffbeatError, match=r"cannot read .*r1-2\.state"):
        outbox.state_of("r1", DEVICE)
    with pytest.raises(GaveUp):
        work(outbox, Deciding())
    assert (outbox.path / "r1-2.state").exists()


def test_a_server_cannot_choose_which_file_is_read(outbox: Outbox) -> None:
    with pytest.raises(InvalidValue, match="cannot name a file"):
        outbox.state_of("../r1", DEVICE)


def test_the_oldest_states_go(outbox: Outbox) -> None:
    for number in range(STATES_MAX + 3):
        finished = keep(outbox, 3, 1, run=f"r{number}")
        os.utime(finished.path.with_suffix(".brought"), (number, number))
        outbox.commit(finished)
    left = {file.name for file in outbox.path.glob("*.state")}
    assert left == {f"r{number}-2.state" for number in range(3, STATES_MAX + 3)}


class FullFor(Disk):
    """A disk that has no room for one kind of file."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def create(self, path: Path) -> Output:
        if self.ending in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path)


def test_where_there_is_no_room_for_the_state_nothing_is_left(tmp_path: Path) -> None:
    with Outbox(tmp_path / "outbox", FullFor(".brought")) as outbox:
        with pytest.raises(OutboxFull):
            keep(outbox, 3, 1)
        assert {file.name for file in outbox.path.iterdir()} == {"worker.json", "worker.lock"}


def test_a_record_of_before_brings_no_state(outbox: Outbox) -> None:
    finished = outbox.keep("r1", 3, X, Trained(50, 6))
    text = finished.record.read_text()
    assert ', "device": 0, "state": null' in text
    finished.record.write_text(text.replace(', "device": 0, "state": null', ""))
    assert outbox.held() == finished
    outbox.commit(finished)
    assert list(outbox.path.glob("*.state")) == []
