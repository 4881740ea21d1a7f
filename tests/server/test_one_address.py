"""Many workers at one address, as behind a proxy or a router, with the settings that everybody has: none is shut out.

However a limit per address is chosen, these numbers must be below it: a fleet behind one router is no attack.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks import idle

from tests.server.serving import Running, Worker, serving
from tests.server.speaking import Line, head, until

WAITING, MANY = 200, 1000
WORKING, TASKS = 30, 3
AT_A_TIME = 10


def joined(running: Running, count: int, name: str) -> list[Worker]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(lambda number: Worker(running, f"{name}-{number}"), range(count)))


def test_those_who_wait_are_all_held_and_keep_nobody_out(tmp_path: Path) -> None:
    with serving(tmp_path, {"in_flight_max": 1}) as running, ExitStack() as held:
        first = Worker(running, "first")
        lease = first.lease()
        for worker in joined(running, WAITING, "idle"):
            ask = head("POST", f"/v1/workers/{worker.number}/ask", {"Content-Length": 0, **worker.session})
            held.enter_context(Line(running, ask))
        until(lambda: len(running.server.context.long_poll) == WAITING)
        assert running.call("GET", "/v1/health").status == 200
        assert first.push(lease["task"], first.train(lease)).status == 200


def test_those_who_work_at_the_same_time_all_get_their_turn(tmp_path: Path) -> None:
    room = {"tasks_per_device": 100, "in_flight_max": 100}
    with serving(tmp_path, room) as running, ThreadPoolExecutor(WORKING) as pool:
        workers = joined(running, WORKING, "busy")
        found = pool.map(lambda worker: [worker.work().status for _ in range(TASKS)], workers)
        assert [status for statuses in found for status in statuses] == [200] * WORKING * TASKS


@pytest.mark.slow
def test_the_benchmark_of_idle_workers_loses_none(tmp_path: Path) -> None:
    with idle.files_allowed(MANY + idle.FILES_BESIDE):
        held, _ = idle._measure(tmp_path, MANY)
    assert held == MANY
