"""Real processes, killed at random moments: whatever was acknowledged is there, once, and training goes on."""

import random
import time
from pathlib import Path

import pytest

from tests.server.independent import replay
from tests.server.serving import TASK
from tests.soak.processes import asked, fleet, kill, wait_until

WORKERS, KILLS, EPOCHS = 4, 20, 400
START_S, END_S = 60.0, 240.0
SLOWER = TASK.replace("model[", "import time; time.sleep(0.02)\n        model[", 1)
OPTIONS = ("--epochs", str(EPOCHS), "--checkpoint-every", "20", "--lease-s", "5", "--keep-updates", "all")


@pytest.mark.slow
def test_twenty_kills_of_the_server_and_of_workers_lose_nothing(tmp_path: Path) -> None:
    chance = random.Random(7)  # noqa: S311 (chosen moments)
    with fleet(tmp_path, SLOWER, *OPTIONS) as made:
        server = made.start_server()
        for number in range(WORKERS):
            made.start_worker(number)
        wait_until(made.up, START_S, "the server did not start")
        for _ in range(KILLS):
            time.sleep(chance.uniform(0.0, 0.4))  # a random moment is the point
            number = chance.randrange(WORKERS)
            kill(made.workers[number])
            made.start_worker(number)
            time.sleep(chance.uniform(0.0, 1.2))
            kill(server)
            server = made.start_server()
            if chance.random() < 0.7:  # else it is killed while it starts
                wait_until(made.up, START_S, "the server did not start again")
        wait_until((made.run / "summary.json").exists, END_S, "training did not finish")
        for worker in made.workers.values():
            worker.wait(END_S)
        server.terminate()
        assert server.wait(END_S) == 0
        acknowledged = made.acknowledged()
    x_sha256, applied = replay(made.run)
    assert acknowledged.items() <= applied.items(), "acknowledged, and not applied"
    facts = asked("verify", str(made.run))
    assert facts["agrees"]
    assert facts["x_sha256"] == x_sha256
    assert facts["applied"] == len(applied) == facts["t"] == EPOCHS
    assert len(acknowledged) > EPOCHS / 2, "most acknowledgements reached their worker"
    assert asked("status", str(made.run))["finished"]
