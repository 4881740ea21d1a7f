"""Real processes, killed at random moments: whatever was acknowledged is there, once, and training goes on."""

import random
import time
from pathlib import Path

import pytest

from offbeat.core.layout import layout_from
from offbeat.core.rules import poly
from offbeat.storage.checkpoints import Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_decision
from offbeat.wire import mapped
from tests.contract.plain_vectors import PlainVectors
from tests.server.independent import replay
from tests.server.serving import TASK
from tests.soak.processes import asked, fleet, kill, wait_until

WORKERS, KILLS, EPOCHS = 4, 20, 400
START_S, END_S = 60.0, 240.0
SLOWER = TASK.replace("model[", "import time; time.sleep(0.02)\n        model[", 1)
OPTIONS = ("--epochs", str(EPOCHS), "--checkpoint-every", "20", "--lease-s", "5", "--keep-updates", "all")

WITH_CACHES = (
    *(
        "--rule",
        "ca2fl:2 + momentum:0.5",
        "--weights",
        "participation",
        "--average",
        "poly:8",
        "--device-cache",
        "disk",
    ),
    *("--epochs", "100", "--checkpoint-every", "7", "--lease-s", "5", "--keep-updates", "all"),
)


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


@pytest.mark.slow
def test_kills_change_no_bit_of_slots_caches_and_mean(tmp_path: Path) -> None:
    chance = random.Random(11)  # noqa: S311 (chosen moments)
    with fleet(tmp_path, SLOWER, *WITH_CACHES) as made:
        server = made.start_server()
        for number in range(WORKERS):
            made.start_worker(number)
        for _ in range(8):
            wait_until(made.up, START_S, "the server did not start")
            time.sleep(chance.uniform(0.0, 1.0))  # a random moment is the point
            kill(server)
            server = made.start_server()
        wait_until((made.run / "summary.json").exists, END_S, "training did not finish")
        server.terminate()
        assert server.wait(END_S) == 0
    assert asked("verify", str(made.run))["agrees"]
    layout = layout_from(read_json(made.run / "layout.json"))
    plain = PlainVectors(mapped(made.run / "x_0.safetensors", layout).vector.copy(), poly(8))
    with Ledger.open(made.run / "ledger.sqlite", read_only=True) as ledger:
        decisions = [d for d in map(as_decision, ledger.rows("decided")) if d.mix is not None]
    for d in decisions:
        if d.mix is not None:
            x_new = mapped(made.run / "updates" / f"{d.lease.task}.safetensors", layout).vector
            plain.apply(d.mix, x_new, plain.versions[d.lease.tau], d.t)
    assert len(decisions) == 200
    assert mapped(made.run / "x.safetensors", layout).vector.tobytes() == plain.x.tobytes()
    assert mapped(made.run / "average.safetensors", layout).vector.tobytes() == plain.mean.tobytes()
    newest = Checkpoints(made.run / "checkpoints", layout, Disk()).newest()
    assert {name: slot.tobytes() for name, slot in newest.standing.slots.items() if slot.any()} == {
        name: slot.tobytes()
        for name, slot in plain.slots.items()
        if slot.any()  # a slot of zeros need not be kept
    }
    assert {cache: vector.tobytes() for cache, vector in newest.caches.items()} == {
        cache: vector.tobytes() for cache, vector in plain.caches.items()
    }
