"""A worker while its heart beats, and when it is told to stop; what it calls is in the order of the script."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.layout import Layout, Model
from offbeat.storage.disk import Disk
from offbeat.worker.api_answers import Acknowledgement, AskAnswer, Joined, LeasedTask, Unreachable
from offbeat.worker.api_client import OtherRun
from offbeat.worker.download import Patience
from tests.unit.test_worker_loop import (
    ACK,
    FINISHED,
    LONG_S,
    Beats,
    Case,
    Plus,
    Scripted,
    Sometimes,
    joined,
    keep,
    lease,
    refused,
)


def interrupt(number: int = signal.SIGTERM) -> None:
    """A signal, and then something that takes long."""
    os.kill(os.getpid(), number)
    threading.Event().wait(LONG_S)
    pytest.fail("it was not interrupted")


# --- the heartbeat ---------------------------------------------------------------------------------------------------


def beaten(beats: Beats) -> Callable[[], None]:
    """Train until the heart has beaten by its script."""
    return lambda: None if beats.beaten.wait(LONG_S) else pytest.fail("the heart does not beat")


def test_the_heart_beats_while_a_task_is_held(tmp_path: Path) -> None:
    beats = Beats(None, Unreachable("no answer"), refused(503, "not_now"), None)
    case = Case(tmp_path, Scripted(beats, ask=[lease()]), Plus(beaten(beats))).run()
    assert case.calls[3:] == ["push 3", "ask", "leave"]
    assert beats.calls == ["heartbeat 3"] * len(beats.calls)
    assert len(beats.calls) >= 4


def test_the_heart_beats_while_an_update_is_pushed_and_rests_while_idle(tmp_path: Path) -> None:
    beats = Beats(None, None)
    idle = threading.Event()

    def wait() -> AskAnswer:
        counted = len(beats.calls)
        assert not idle.wait(0.3)
        assert len(beats.calls) == counted
        return FINISHED

    def push() -> Acknowledgement:
        assert beats.beaten.wait(LONG_S)
        return ACK

    case = Case(tmp_path, Scripted(beats, ask=[lease(), wait], push=[push])).run()
    assert case.calls[-2:] == ["ask", "leave"]


def test_a_released_lease_does_not_end_the_training(tmp_path: Path) -> None:
    beats = Beats(refused(410, "released"))
    case = Case(tmp_path, Scripted(beats, ask=[lease()]), Plus(beaten(beats))).run()
    assert case.calls[3:] == ["push 3", "ask", "leave"]
    assert beats.calls == ["heartbeat 3"]


def test_a_revoked_task_ends_the_training(tmp_path: Path) -> None:
    beats = Beats(refused(410, "revoked"))
    task = Plus(lambda: threading.Event().wait(LONG_S) or pytest.fail("it was not interrupted"), None)
    case = Case(tmp_path, Scripted(beats, ask=[lease(), lease(4)]), task).run()
    assert case.calls[1:] == ["ask", "pull /v1/models/7", "ask", "pull /v1/models/7", "push 4", "ask", "leave"]
    assert "task 3 is not wanted any more" in case.lines


@pytest.mark.parametrize("wait", ["after the training", "for the model"])
def test_a_revocation_is_heard_while_a_task_waits(tmp_path: Path, wait: str) -> None:
    """Otherwise an update is pushed that the server refuses."""
    beats = Beats(refused(410, "revoked"))

    class Away(Scripted):
        def pull(self, lease: LeasedTask, layout: Layout, patience: Patience) -> Model:
            if wait == "for the model":
                patience(refused(503, "not_now", retry_after_s=LONG_S))
            return super().pull(lease, layout, patience)

    case = Case(tmp_path, Away(beats, ask=[lease()])).run(at_least_s=LONG_S if wait == "after the training" else 0.0)
    assert "push 3" not in case.calls
    assert "task 3 is not wanted any more" in case.lines
    assert case.calls[-2:] == ["ask", "leave"]


def test_a_revocation_does_not_disturb_the_push(tmp_path: Path) -> None:
    beats = Beats(refused(410, "revoked"))

    def push() -> Acknowledgement:
        assert beats.beaten.wait(LONG_S)
        assert not threading.Event().wait(0.1)
        raise refused(409, "too_stale")

    case = Case(tmp_path, Scripted(beats, ask=[lease()], push=[push])).run()
    assert case.calls[3:] == ["push 3", "ask", "leave"]


def test_the_heart_joins_again_where_the_server_forgot_the_session(tmp_path: Path) -> None:
    beats = Beats(refused(401, "unknown_session"), None)
    Case(tmp_path, Scripted(beats, ask=[lease()]), Plus(beaten(beats))).run()
    assert beats.calls[:3] == ["heartbeat 3", "rejoin 5-a 3", "heartbeat 3"]


def test_the_heart_finds_another_run(tmp_path: Path) -> None:
    class Moved(Beats):
        def rejoin(self, stale: str, holding: int | None = None) -> Joined:  # noqa: ARG002
            raise OtherRun

    task = Plus(lambda: threading.Event().wait(LONG_S) or pytest.fail("it was not interrupted"))
    server = Scripted(
        Moved(refused(401, "unknown_session")),
        join=[joined(), joined("r2")],
        ask=[lease(), refused(401, "unknown_session")],
        rejoin=[OtherRun()],
    )
    case = Case(tmp_path, server, task).run()
    assert case.calls[3:] == ["ask", "rejoin 5-a None", "join None", "ask", "leave"]


# --- stopping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_while_training(tmp_path: Path, number: int) -> None:
    before = signal.getsignal(number)
    case = Case(tmp_path, Scripted(ask=[lease()]), Plus(lambda: interrupt(number))).run()
    assert case.calls == ["join None", "ask", "pull /v1/models/7", "hand_back 3", "leave"]
    assert case.lines[-1] == "stopped"
    assert signal.getsignal(number) is before


def test_a_task_that_catches_every_exception_is_stopped(tmp_path: Path) -> None:
    def stubborn() -> None:
        with suppress(Exception):
            interrupt()
        pytest.fail("it went on")

    case = Case(tmp_path, Scripted(ask=[lease()]), Plus(stubborn)).run()
    assert case.calls[-2:] == ["hand_back 3", "leave"]


@pytest.mark.parametrize("verb", ["join", "ask", "pull"])
def test_told_to_stop_while_it_waits_for_an_answer(tmp_path: Path, verb: str) -> None:
    script: dict[str, Any] = {"ask": [lease()], verb: [interrupt]}
    case = Case(tmp_path, Scripted(**script)).run()
    ends = {"join": ["join None"], "ask": ["ask", "leave"], "pull": ["pull /v1/models/7", "hand_back 3", "leave"]}
    assert case.calls[-len(ends[verb]) :] == ends[verb]


def test_told_to_stop_while_a_cut_pull_goes_on(tmp_path: Path) -> None:
    """The patience in between does not end what may be interrupted."""

    class Cut(Scripted):
        def pull(self, lease: LeasedTask, layout: Layout, patience: Patience) -> Model:
            patience(Unreachable("no answer"))
            return super().pull(lease, layout, patience)

    case = Case(tmp_path, Cut(ask=[lease()], pull=[interrupt])).run()
    assert case.calls == ["join None", "ask", "pull /v1/models/7", "hand_back 3", "leave"]


def test_told_to_stop_while_the_server_is_away_nothing_is_pushed(tmp_path: Path) -> None:
    """That would only take long."""
    keep(tmp_path)
    case = Case(tmp_path, Scripted(push=[Unreachable("no answer")]))
    case.first_s = 60
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    case.run()
    assert case.calls == ["join 2", "push 2 resume", "leave"]
    assert case.server.hurried == [1.0]
    assert case.held() == 2


def test_told_to_stop_while_pushing_it_pushes_once_more(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()], push=[interrupt, ACK])).run()
    assert case.server.hurried == [5.0, 2.0]
    assert case.calls[3:] == ["push 3", "push 3 resume", "leave"]
    assert case.held() is None
    assert case.outcomes() == ["applied"]


@pytest.mark.parametrize("why", [Unreachable("no"), refused(429, "busy"), refused(401, "unknown_session")])
def test_what_could_not_be_pushed_quickly_stays(tmp_path: Path, why: Exception) -> None:
    case = Case(tmp_path, Scripted(ask=[lease()], push=[interrupt, why])).run()
    assert case.calls[3:] == ["push 3", "push 3 resume", "leave"]
    assert case.held() == 3
    assert case.lines[-1] == "stopped; the update of task 3 is pushed next time"


class Interrupting(Disk):
    """A signal comes while an update is written."""

    def __init__(self) -> None:
        self.written = 0

    def write_unnamed(self, path: Path, parts: Any) -> None:
        if path.suffix == ".safetensors":
            os.kill(os.getpid(), signal.SIGTERM)
        super().write_unnamed(path, parts)
        self.written += 1


def test_told_to_stop_while_the_update_is_written_it_is_written(tmp_path: Path) -> None:
    disk = Interrupting()
    case = Case(tmp_path, Scripted(ask=[lease()]), disk=disk).run()
    assert case.calls[3:] == ["push 3 resume", "leave"]
    assert np.array_equal(case.server.pushed[0].vector, np.full(10, 0.5, np.float32))


def test_another_thread_can_stop_a_worker(tmp_path: Path) -> None:
    case = Case(tmp_path, Scripted())
    case.eligibility = Sometimes(*["never"] * 10_000)
    worker = case.worker()
    thread = threading.Thread(target=worker.run)
    thread.start()
    worker.interrupts.stop()
    thread.join(LONG_S)
    assert not thread.is_alive()
    case.outbox.close()
    case.journal.close()


def test_the_second_signal_ends_the_process_at_once() -> None:
    program = """
import os, signal, sys
from offbeat.worker.interrupts import Interrupts, WorkerStopped
with Interrupts() as interrupts:
    try:
        with interrupts.allowed():
            os.kill(os.getpid(), signal.SIGTERM)
            while True: pass
    except WorkerStopped:
        print("stopping", flush=True)
        os.kill(os.getpid(), signal.SIG%s)
        while True: pass
"""
    for name, status in (("TERM", 143), ("INT", 130)):
        command = [sys.executable, "-c", program % name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        assert (done.returncode, done.stdout) == (status, "stopping\n")
