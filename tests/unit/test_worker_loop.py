"""The life of a worker against a scripted server: what it calls, in which order, whatever happens."""

import errno
import random
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Array, Layout, Model
from offbeat.core.model_base import ModelBase, base_of
from offbeat.errors import LayoutMismatch, OffbeatError
from offbeat.storage.disk import Disk, Output
from offbeat.task import Trained, Work
from offbeat.wire import unpack
from offbeat.worker.api_answers import Acknowledgement, AskAnswer, Joined, LeasedTask, RequestRefused, Unreachable
from offbeat.worker.api_client import ApiClient, Hello, OtherRun, OwnModel
from offbeat.worker.download import Patience
from offbeat.worker.eligibility import Eligibility
from offbeat.worker.http_client import HttpClient
from offbeat.worker.journal import Journal
from offbeat.worker.loop import GaveUp, Worker
from offbeat.worker.outbox import Finished, Outbox
from offbeat.worker.retrying import Backoff
from offbeat.worker.settings import Address, WorkerSettings

X = Model.of({"x": np.zeros(10, np.float32)})
LONG_S = 10.0
"""No test takes so long."""
ACK = Acknowledgement(task=3, outcome="applied", t=9, tau=7, staleness=1, alpha_t=0.42, repeated=False)
FINISHED = AskAnswer("finished", reason="epochs reached")


def joined(run: str = "r1", session: str = "5-a", state: str = "idle", layout: Layout = X.layout) -> Joined:
    return Joined(5, session, 2, run, 1, "task", {}, layout.fingerprint, 25.0, 0.05, state)


def lease(task: int = 3) -> AskAnswer:
    return AskAnswer("working", LeasedTask(task, 2, 4, 7, 1, "/v1/models/7", None, local_iterations=6, gamma=0.5))


def refused(status: int, error: str, retry_after_s: float | None = None) -> RequestRefused:
    return RequestRefused(status, error, f"it is {error}", "Do.", retry_after_s=retry_after_s)


class Unconnected(ApiClient):
    """Never opens a connection."""

    def __init__(self) -> None:
        super().__init__(HttpClient(Address("127.0.0.1", 1, tls=False)), Hello("w", "task"))


class Beats(Unconnected):
    """The heartbeat's client; what a script says after its end is said again and again."""

    def __init__(self, *script: Any) -> None:
        super().__init__()
        self.script, self.calls = list(script), list[str]()
        self.beaten = threading.Event()

    @property
    def joined(self) -> Joined:
        return joined()

    def heartbeat(self, task: int) -> None:
        self.calls.append(f"heartbeat {task}")
        try:
            if self.script:
                played(self.script.pop(0))
        finally:
            if not self.script:
                self.beaten.set()

    def rejoin(self, stale: str, holding: int | None = None) -> Joined:
        self.calls.append(f"rejoin {stale} {holding}")
        return joined()


def played(entry: Any) -> Any:
    """What a script says: a value, an error, or something to do."""
    if isinstance(entry, BaseException):
        raise entry
    return entry() if callable(entry) else entry


class Scripted(Unconnected):
    """A server that answers by script: for every verb what comes first, second, and so on."""

    def __init__(self, beats: Beats | None = None, **script: Any) -> None:
        super().__init__()
        self.script = {"join": [joined()], "rejoin": [joined(session="5-b")], **script}
        self.calls: list[str] = []
        self.pushed: list[Model] = []
        self.declared: list[OwnModel] = []
        self.claimed: list[int] = []
        """Samples of every push."""
        self.hurried: list[float] = []
        self.http.hurry = self.hurried.append  # type: ignore[assignment,method-assign]
        self.beats = beats or Beats()
        self.known = ""

    @property
    def session(self) -> str:
        return self.known

    def _next(self, verb: str, *facts: object, default: Any = None) -> Any:
        self.calls.append(" ".join([verb, *map(str, facts)]))
        entries = self.script.get(verb, [])
        return played(entries.pop(0) if entries else default)

    def beside(self) -> ApiClient:
        return self.beats

    def join(self, holding: int | None = None) -> Joined:
        answer: Joined = self._next("join", holding)
        self.known = answer.session
        return answer

    def rejoin(self, stale: str, holding: int | None = None) -> Joined:
        answer: Joined = self._next("rejoin", stale, holding)
        self.known = answer.session
        return answer

    def declare(self, own: OwnModel) -> None:
        """Between joining and asking, so it is noted beside the other calls."""
        self.declared.append(own)
        if self.script.get("declare"):
            played(self.script["declare"].pop(0))

    def ask(self) -> AskAnswer:
        answer: AskAnswer = self._next("ask", default=FINISHED)
        return answer

    def pull(self, lease: LeasedTask, layout: Layout, patience: Patience) -> Model:  # noqa: ARG002
        model: Model = self._next("pull", lease.model, default=X)
        return model.copy()

    def push(self, finished: Finished, *, resume: bool = False) -> Acknowledgement:
        self.claimed.append(finished.samples)
        self.pushed.append(unpack(finished.path.read_bytes(), X.layout))
        answer: Acknowledgement = self._next("push", finished.task, *(["resume"] if resume else []), default=ACK)
        return answer

    def hand_back(self, task: int) -> None:
        self._next("hand_back", task)

    def leave(self) -> None:
        self._next("leave")


class Plus:
    """Adds the rate to every number, after something was done."""

    def __init__(self, *script: Any) -> None:
        self.script, self.works = list(script), list[Work]()

    def initial(self, seed: int) -> Mapping[str, Array]:  # noqa: ARG002
        return X

    def train(self, model: Model, work: Work) -> Trained:
        self.works.append(work)
        if self.script:
            found = played(self.script.pop(0))
            if found is not None:
                return found  # type: ignore[no-any-return]
        model.vector[:] += work.gamma or 1.0
        return Trained(50, 6, {"loss": 0.25})

    def evaluate(self, model: Model) -> Mapping[str, float]:  # noqa: ARG002
        return {}


class Case:
    """A worker with everything around it."""

    def __init__(self, folder: Path, server: Scripted, task: Plus | None = None, disk: Disk | None = None) -> None:
        self.server, self.task = server, task or Plus()
        self.lines: list[str] = []
        self.outbox = Outbox(folder / "outbox", disk)
        self.journal = Journal(folder / "journal")
        self.eligibility = Eligibility()
        self.first_s = 0.001
        """The first wait after a failure."""

    def run(self, **settings: Any) -> "Case":
        try:
            self.worker(**settings).run()
        finally:
            self.journal.close()
            self.outbox.close()
        return self

    def worker(self, **settings: Any) -> Worker:
        return Worker(
            self.server,
            self.outbox,
            lambda _joined: self.task,
            WorkerSettings(server="http://127.0.0.1:1", eligible_every_s=0.01, **settings),
            eligibility=self.eligibility,
            journal=self.journal,
            backoff=lambda: Backoff(self.first_s, self.first_s, random.Random(1).random),  # noqa: S311 (jitter)
            say=self.lines.append,
            describe=lambda error: f"{type(error).__name__}: {error}",
        )

    @property
    def calls(self) -> list[str]:
        return self.server.calls

    def held(self) -> int | None:
        with Outbox(self.outbox.path) as outbox:
            found = outbox.held()
        return None if found is None else found.task

    def outcomes(self) -> list[str]:
        lines = self.journal.path.read_text().splitlines() if self.journal.path else []
        return [line.rpartition(": ")[2].strip('"}') for line in lines]


def keep(folder: Path, run: str = "r1", task: int = 2) -> None:
    with Outbox(folder / "outbox") as outbox:
        outbox.keep(run, task, X, Trained(50, 6))


# --- working ---------------------------------------------------------------------------------------------------------


def test_a_task_from_end_to_end(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[AskAnswer("idle"), lease(), FINISHED])).run()
    assert case.calls == ["join None", "ask", "ask", "pull /v1/models/7", "push 3", "ask", "leave"]
    assert case.task.works == [Work(device=2, number=4, seed=1, local_iterations=6, gamma=0.5)]
    assert np.array_equal(case.server.pushed[0].vector, np.full(10, 0.5, np.float32))
    assert case.held() is None
    assert case.outcomes() == ["applied"]
    assert case.lines == [
        "joined run r1 as worker 5, for device 2",
        "task 3 on version 7: trained 6 gradients in 0.0 s",
        "pushed 3: mixed as epoch 9, staleness 1, alpha_t 0.42",
        "the run is finished: epochs reached",
    ]


def test_a_held_update_is_pushed_first(tmp_path: Path) -> None:
    keep(tmp_path)
    case = Case(tmp_path, Scripted(ask=[lease(), FINISHED])).run()
    assert case.calls[:4] == ["join 2", "push 2 resume", "ask", "pull /v1/models/7"]
    assert case.held() is None


def test_a_held_update_of_another_run_is_dropped_with_a_word(tmp_path: Path) -> None:
    keep(tmp_path, run="r0")
    case = Case(tmp_path, Scripted()).run()
    assert case.calls == ["join 2", "ask", "leave"]
    assert case.held() is None
    assert "dropped the update of task 2: it is of run r0, the server has r1" in case.lines


def test_a_finished_run_gets_what_is_held_and_loads_nothing(tmp_path: Path) -> None:
    keep(tmp_path)
    case = Case(tmp_path, Scripted(join=[joined(state="finished")], push=[refused(409, "finished")]))
    case.worker = lambda **_: Worker(  # type: ignore[method-assign]
        case.server, case.outbox, lambda _: pytest.fail("it was loaded"), WorkerSettings(server="http://127.0.0.1:1")
    )
    case.run()
    assert case.calls == ["join 2", "push 2 resume", "leave"]
    assert case.held() is None


def test_a_damaged_update_is_said_and_not_pushed(tmp_path: Path) -> None:
    keep(tmp_path)
    (tmp_path / "outbox" / "r1-2.safetensors").write_bytes(b"nonsense")
    case = Case(tmp_path, Scripted()).run()
    assert case.calls[0] == "join None"
    assert "was removed" in case.lines[0]


def test_a_refused_update_is_dropped_and_the_worker_goes_on(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease(), lease(4)], push=[refused(409, "too_stale"), ACK])).run()
    assert case.calls[3:] == ["push 3", "ask", "pull /v1/models/7", "push 4", "ask", "leave"]
    assert case.outcomes() == ["too_stale", "applied"]
    assert "pushed 3: refused: it is too_stale" in case.lines


def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    busy = refused(429, "busy", retry_after_s=0.01)
    case = Case(tmp_path, Scripted(ask=[lease()], push=[busy, busy, ACK])).run()
    assert case.calls[3:6] == ["push 3", "push 3 resume", "push 3 resume"]
    assert [line for line in case.lines if "busy" in line] == ["it is busy. Do; trying again until it works"]


def test_a_server_that_is_away_is_waited_for_and_told_once(tmp_path: Path) -> None:
    away = [Unreachable("no answer")] * 5
    server = Scripted(join=[*away, joined()], ask=[*away, lease()], push=[*away, ACK])
    case = Case(tmp_path, server).run()
    assert case.calls.count("push 3 resume") == 5
    assert [line for line in case.lines if "answer" in line] == [
        *("no answer; trying again until it works", "the server answers again") * 3
    ]


def test_what_stands_before_the_server_may_say_anything_for_a_while(tmp_path: Path) -> None:
    page = RequestRefused(404, "", "the server answered 404")
    case = Case(tmp_path, Scripted(ask=[page, page, lease()])).run()
    assert case.calls[:5] == ["join None", "ask", "ask", "ask", "pull /v1/models/7"]


def test_a_stranger_at_the_first_join_is_told(tmp_path: Path) -> None:
    with pytest.raises(RequestRefused, match="404"):
        Case(tmp_path, Scripted(join=[RequestRefused(404, "", "the server answered 404")])).run()


def test_a_version_that_is_gone_is_handed_back(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease(), lease(4)], pull=[refused(410, "gone"), X])).run()
    assert case.calls[1:6] == ["ask", "pull /v1/models/7", "hand_back 3", "ask", "pull /v1/models/7"]


def test_a_quarantined_worker_waits_and_asks_again(tmp_path: Path) -> None:
    out = refused(403, "quarantined", retry_after_s=0.01)
    case = Case(tmp_path, Scripted(ask=[out, out, out, lease()])).run()
    assert case.calls[:5] == ["join None", *["ask"] * 4]
    assert len([line for line in case.lines if "quarantined" in line]) == 1


@pytest.mark.parametrize(
    ("status", "error"), [(401, "bad_token"), (401, "no_token"), (403, "not_allowed"), (426, "wrong_version")]
)
@pytest.mark.parametrize("verb", ["join", "ask", "pull", "push"])
def test_who_may_not_ends(tmp_path: Path, verb: str, status: int, error: str) -> None:
    script: dict[str, Any] = {"ask": [lease()], verb: [refused(status, error)]}
    case = Case(tmp_path, Scripted(**script))
    with pytest.raises(RequestRefused, match=error):
        case.run()
    assert case.held() == (3 if verb == "push" else None)
    assert case.calls[-1].split()[0] == (verb if verb == "join" else "leave")


class Counting(Plus):
    """Says how many samples a device holds, or fails to."""

    def __init__(self, samples: Any, *script: Any) -> None:
        super().__init__(*script)
        self._samples = samples

    def samples(self, device: int) -> int:
        found: int = played(self._samples) if not isinstance(self._samples, int) else self._samples + device
        return found


def test_samples_and_base_are_declared_before_the_first_task(tmp_path: Path) -> None:
    server = Scripted()
    server.script["ask"] = [lambda: lease() if server.declared else FINISHED]
    case = Case(tmp_path, server, Counting(40)).run()
    base = base_of(X.layout, {})
    assert case.server.declared == [OwnModel(42, base)]
    assert case.server.declared[0].as_json() == {"samples": 42, "base": base.digest, "frozen": {}}
    assert case.server.claimed == [42], "not the 50 that the task reports"
    assert sum("the task reports 50 samples, but this worker holds 42" in line for line in case.lines) == 1


@pytest.mark.parametrize(("known", "claimed"), [(None, [50, 50]), (33, [33, 33])])
def test_a_task_that_does_not_count_is_held_to_what_is_known_or_to_its_first_training(
    tmp_path: Path, known: int | None, claimed: list[int]
) -> None:
    server = Scripted(join=[replace(joined(), samples=known)], ask=[lease(3), lease(4)])
    case = Case(tmp_path, server, Plus(None, Trained(60, 6))).run()
    assert case.server.declared == [OwnModel(None, base_of(X.layout, {}))]
    assert case.server.claimed == claimed


@pytest.mark.parametrize("odd", [ValueError("no data yet"), 0 - 2])
def test_samples_that_cannot_be_counted_yet_do_not_end_the_worker(tmp_path: Path, odd: Any) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()]), Counting(odd)).run()
    assert [own.samples for own in case.server.declared] == [None]
    assert case.server.claimed == [50]


@pytest.mark.parametrize(("status", "error"), [(409, "wrong_base"), (422, "false_claim")])
def test_a_declaration_that_is_refused_ends_the_worker(tmp_path: Path, status: int, error: str) -> None:
    case = Case(tmp_path, Scripted(declare=[refused(status, error)]))
    with pytest.raises(RequestRefused, match=f"it is {error}"):
        case.run()
    assert case.calls == ["join None", "leave"]


def test_a_declaration_with_many_frozen_arrays_does_not_list_them() -> None:
    few = OwnModel(None, ModelBase("d", {f"layer {number}": "0" * 16 for number in range(500)}))
    many = OwnModel(None, ModelBase("d", {f"layer {number}": "0" * 16 for number in range(501)}))
    long = OwnModel(None, ModelBase("d", {f"{number} {'x' * 900}": "0" * 16 for number in range(100)}))
    assert [own.as_json()["frozen"] is None for own in (few, many, long)] == [False, True, True]


def test_another_model_than_the_server_s_is_refused(tmp_path: Path) -> None:
    other = Model.of({"y": np.zeros(10, np.float32)}).layout
    case = Case(tmp_path, Scripted(join=[joined(layout=other)]))
    with pytest.raises(LayoutMismatch, match="makes another model"):
        case.run()
    assert case.calls == ["join None", "leave"]


def test_a_task_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted())
    case.task.initial = lambda _seed: played(ZeroDivisionError("by zero"))  # type: ignore[assignment, method-assign]
    with pytest.raises(OffbeatError, match="ZeroDivisionError: by zero"):
        case.run()
    assert case.calls == ["join None", "leave"]


# --- sessions --------------------------------------------------------------------------------------------------------


def test_a_forgotten_worker_joins_again(tmp_path: Path) -> None:
    unknown = refused(401, "unknown_session")
    case = Case(tmp_path, Scripted(ask=[unknown, lease()], rejoin=[joined(session="5-b")] * 2, push=[unknown, ACK]))
    case.run()
    assert case.calls == [
        *("join None", "ask", "rejoin 5-a None", "ask", "pull /v1/models/7"),
        *("push 3", "rejoin 5-b 3", "push 3 resume", "ask", "leave"),
    ]
    assert len([line for line in case.lines if line.startswith("joined again")]) == 2


def test_a_worker_that_is_forgotten_time_and_again_gives_up(tmp_path: Path) -> None:
    unknown = [refused(401, "unknown_session")] * 100
    case = Case(tmp_path, Scripted(ask=unknown, rejoin=[joined()] * 100))
    with pytest.raises(OffbeatError, match="its own --name"):
        case.run()


def test_another_run_begins_anew(tmp_path: Path) -> None:
    server = Scripted(
        join=[joined(), joined("r2")],
        ask=[lease(), FINISHED],
        push=[refused(401, "unknown_session")],
        rejoin=[OtherRun()],
    )
    case = Case(tmp_path, server).run()
    assert case.calls[3:] == ["push 3", "rejoin 5-a 3", "join 3", "ask", "leave"]
    assert case.held() is None
    assert "dropped the update of task 3: it is of run r1, the server has r2" in case.lines


# --- trainings that fail ---------------------------------------------------------------------------------------------


def test_a_failed_training_is_handed_back(tmp_path: Path) -> None:
    task = Plus(ZeroDivisionError("by zero"), None)
    case = Case(tmp_path, Scripted(ask=[lease(), lease(4)]), task).run()
    assert case.calls[1:6] == ["ask", "pull /v1/models/7", "hand_back 3", "ask", "pull /v1/models/7"]
    assert "task 3 failed: ZeroDivisionError: by zero" in case.lines


def test_too_many_failures_in_a_row_end_the_worker(tmp_path: Path) -> None:
    fail = ValueError("no")
    task = Plus(fail, fail, None, fail, fail, fail)
    case = Case(tmp_path, Scripted(ask=[lease(n) for n in range(20)]), task)
    with pytest.raises(GaveUp, match="3 trainings in a row failed"):
        case.run(failures_max=3)
    assert len(task.works) == 6
    assert case.calls[-3:] == ["pull /v1/models/7", "hand_back 5", "leave"]


@pytest.mark.parametrize("odd", [3, Trained(0, 1), Trained(1, -1), Trained(1, 1, {"a": "b"})])  # type: ignore[dict-item]
def test_what_cannot_be_sent_is_a_failure(tmp_path: Path, odd: Any) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()]), Plus(odd)).run()
    assert case.calls[3:] == ["hand_back 3", "ask", "leave"]


def test_metrics_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    seen = []
    server = Scripted(ask=[lease()])
    push = server.push
    server.push = lambda finished, **resume: (seen.append(dict(finished.metrics)), push(finished, **resume))[1]  # type: ignore
    Case(tmp_path, server, Plus(Trained(np.int64(5), 1, {"a": float("nan"), "b": np.float32(0.5)}))).run()  # type: ignore
    assert seen == [{"b": 0.5}]


class Full(Disk):
    """Has no room at first."""

    def __init__(self, times: int) -> None:
        self.times = times

    def create(self, path: Path) -> Output:
        if ".safetensors" in path.name and self.times:
            self.times -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path)


def test_a_full_disk_is_waited_for_while_the_heart_beats(tmp_path: Path) -> None:
    server = Scripted(ask=[lease()])
    case = Case(tmp_path, server, disk=Full(3)).run()
    assert case.calls[3] == "push 3"
    assert len([line for line in case.lines if "make room" in line]) == 1


# --- eligibility -----------------------------------------------------------------------------------------------------


class Sometimes(Eligibility):
    """Not eligible for these reasons, one after the other."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = list(reasons)

    def why_not(self) -> str | None:
        return self.reasons.pop(0) if self.reasons else None


def test_a_device_that_may_not_train_does_not_ask(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted())
    case.eligibility = Sometimes("on battery", "on battery", "busy")
    case.run()
    assert case.lines[1:3] == ["not now: on battery", "not now: busy"]
    assert case.calls == ["join None", "ask", "leave"]
