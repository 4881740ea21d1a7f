"""A server that runs out of descriptors: it says so, does not spin, and goes on when there are some again."""

import errno
import json
import resource
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from offbeat.server.descriptors import refusal_of
from offbeat.server.uploads import UPLOADS
from tests.server.serving import TASK, Running, Worker, serving
from tests.server.speaking import Line, file_of, head, ones, put, refused, until

FILES = Path("/proc/self/fd")
pytestmark = pytest.mark.skipif(not FILES.exists(), reason="only Linux lets a test change a limit of another process")
LOOKS = 200
LOOPS = {"uvloop": "", "asyncio": "sys.modules['uvloop'] = None;"}
START = "import sys; {loop} from offbeat.cli import main; main()"
DATA = file_of(ones())
HEALTH = head("GET", "/v1/health")


@dataclass
class Limited(Running):
    """A server in a process of its own, whose descriptors can be taken away."""

    pid: int = 0

    def processor_s(self) -> float:
        facts = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(facts[11]) + int(facts[12])) / 100

    def allow(self, more: int) -> None:
        """So many descriptors more than it has open now; a number below the limit that is free counts."""
        hard = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)[1]
        looks = deque([self._open()], maxlen=LOOKS)
        until(lambda: self._looked(looks) and len(looks) == LOOKS and all(look == looks[0] for look in looks))
        lowest = min(next(number for number in count() if number not in look) for look in looks)
        most = lowest if not more else min(hard, max(map(max, looks)) + more)
        resource.prlimit(self.pid, resource.RLIMIT_NOFILE, (most, hard))

    def _looked(self, looks: deque[set[int]]) -> bool:
        """Once more: a file may be open for a moment, and a connection may still be closing."""
        looks.append(self._open())
        return True

    def _open(self) -> set[int]:
        return {int(one.name) for one in Path(f"/proc/{self.pid}/fd").iterdir()}


def pushed(worker: Worker) -> bool:
    return worker.push(worker.lease()["task"], DATA).status == 200


@contextmanager
def limited(folder: Path, loop: str) -> Iterator[Limited]:
    (folder / "line.py").write_text(TASK)
    arguments = ("serve", str(folder / "line.py"), "--dir", str(folder / "run"), "--port", "0", "--epochs", "1000")
    command = [sys.executable, "-c", START.format(loop=LOOPS[loop]), *arguments]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            where = folder / "run" / "server.json"
            until(lambda: process.poll() is not None or where.exists())
            assert process.poll() is None, (folder / "log").read_text()
            server: Any = None
            yield Limited(server, folder / "run", json.loads(where.read_text())["url"], process.pid)
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("loop", LOOPS)
def test_who_connects_is_told_and_the_listener_goes_on(tmp_path: Path, loop: str) -> None:
    with limited(tmp_path, loop) as running, ExitStack() as lines:
        worker = Worker(running)
        assert pushed(worker)
        connected = lines.enter_context(Line(running, HEALTH))
        assert connected.answer().status == 200
        running.allow(0)
        begun, processor_s = time.monotonic(), running.processor_s()
        for _ in range(3):
            with Line(running, HEALTH) as line:
                told = refused(line.answer(), 503, "no_descriptors")
                assert "open" in told["message"]
                assert "LimitNOFILE" in told["do"]
        waiting = [lines.enter_context(Line(running)) for _ in range(40)]
        assert connected.send(HEALTH).answer().status == 200, "who is in stays in"
        until(lambda: time.monotonic() - begun > 2.0)
        spent = running.processor_s() - processor_s
        assert spent < 0.5 * (time.monotonic() - begun), "it waits, and does not spin"
        running.allow(100)
        for line in waiting:
            line.cut()
        until(lambda: running.call("GET", "/v1/health").status == 200)
        assert pushed(worker)
    assert (tmp_path / "log").read_text().count("cannot be accepted") < 20


@pytest.mark.parametrize("loop", LOOPS)
def test_a_push_is_told_of_descriptors_and_not_of_the_disk(tmp_path: Path, loop: str) -> None:
    with limited(tmp_path, loop) as running, ExitStack() as lines:
        worker = Worker(running)
        task = worker.lease()["task"]
        lines.enter_context(Line(running, HEALTH)).answer()
        push = lines.enter_context(Line(running, HEALTH))
        assert push.answer().status == 200
        running.allow(0)
        refused(push.send(put(worker, task, DATA) + DATA).answer(), 503, "no_descriptors")
        running.allow(100)
        until(lambda: worker.push(task, DATA).status == 200)


def test_listeners_are_told_of_descriptors(tmp_path: Path) -> None:
    with limited(tmp_path, "uvloop") as running, Line(running, HEALTH) as line, Line(running, HEALTH) as page:
        assert [line.answer().status, page.answer().status] == [200, 200]
        running.allow(0)
        refused(line.send(head("GET", "/v1/events")).answer(), 503, "no_descriptors")
        refused(page.send(head("GET", "/updates.json")).answer(), 503, "no_descriptors")
        running.allow(100)
        assert line.send(head("GET", "/v1/events")).head()[0] == 200


def test_what_the_system_refuses_has_its_own_word() -> None:
    words = {number: refusal_of("write", OSError(number, "why")).error for number in (errno.EMFILE, errno.ENFILE)}
    assert set(words.values()) == {"no_descriptors"}
    assert refusal_of("write", OSError(errno.ENOSPC, "why")).error == "disk_full"
    assert refusal_of("write", OSError(errno.EACCES, "why")).error == "not_now"


def test_a_server_that_has_room_for_few_connections_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(tmp_path, {}, {"uploads_max": 10**7}):
        pass
    assert "only 1 connections at a time" in caplog.text
    assert "lower these" in caplog.text


def test_the_limits_follow_the_tasks_in_flight_and_leave_connections_their_half(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = {"devices": 8, "tasks_per_device": 10**6, "in_flight_max": 8 * 10**6}
    with serving(tmp_path, crowd) as running:
        assert running.server.run.coordinator.plan.queue_max == 8 * 10**6
        assert running.server.app[UPLOADS]._most == 8 * 10**6
        assert Worker(running).work().status == 200
    assert "connections at a time" not in caplog.text


def test_what_is_chosen_is_not_raised(tmp_path: Path) -> None:
    crowd = {"tasks_per_device": 100, "in_flight_max": 100, "queue_max": 3}
    with serving(tmp_path, crowd, {"uploads_max": 2}) as running:
        assert running.server.run.coordinator.plan.queue_max == 3
        assert running.server.app[UPLOADS]._most == 2


def test_few_tasks_in_flight_have_the_room_that_they_had(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 2}) as running:
        assert running.server.run.coordinator.plan.queue_max == 64
        assert running.server.app[UPLOADS]._most == 64
