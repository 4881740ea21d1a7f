"""Runs to be damaged, how their files are damaged, and what anybody reads of them."""

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import offbeat
from offbeat.cli.models import _of_folder
from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.protocol.snapshot import snapshot
from offbeat.server.server import ServeOptions, Server
from offbeat.server.settings import ServerSettings
from offbeat.server.verify import sentence, verify
from offbeat.settings import Settings
from offbeat.sim.curve import CONTRIBUTION, CURVE, read_curve
from offbeat.sim.run import Simulation
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import CHATTER
from offbeat.storage.run_folder import RunFolder
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import until

LINE = Path(__file__).parents[1] / "golden" / "line.py"
SERVED: dict[str, Any] = {"keep_best": "size", "evaluate_every": 9, "bad_updates_max": 2, "alpha": 0.5}
SIMULATED: dict[str, Any] = {"epochs": 30, "seed": 1, "keep_best": "loss:min", "target": "loss<=0.55", "alpha": 0.5}
START, VERIFY, NOTHING = "start", "verify", "nothing"
"""Where damage is found: a start refuses, `verify` tells, or all that anybody reads is as it was."""


@dataclass(frozen=True)
class DamagedRun:
    """A run's folder, and how a process would go on with it."""

    folder: Path
    settings: dict[str, Any]
    limits: dict[str, Any] | None = None
    """Of a served run."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def copied(self, to: Path) -> "DamagedRun":
        shutil.rmtree(to, ignore_errors=True)
        shutil.copytree(self.folder, to)
        return DamagedRun(to, self.settings, self.limits)

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.run)) for file in self.run.rglob("*") if file.is_file())


# --- runs ------------------------------------------------------------------------------------------------------------


def stopped_run(folder: Path) -> DamagedRun:
    """Finished and stopped; every update is kept."""
    settings, limits = SERVED | {"epochs": 28}, {"checkpoint_every": 10, "keep_updates": "all"}
    with serving(folder, settings, limits) as running:
        _lived(running, 28)
        until((running.folder / "summary.json").exists)
    return DamagedRun(folder, settings, limits)


def killed_run(folder: Path) -> DamagedRun:
    """As a `kill -9` leaves it, with updates and open leases after the checkpoint; its rule uses x_tau."""
    settings, limits = SERVED | {"rule": "delta"}, {"checkpoint_every": 8}
    with serving(folder.with_name("alive"), settings, limits) as running:
        worker = _lived(running, 28)
        until(lambda: running.status()["metrics_t"] == 27)
        late = Worker(running, "late")
        lease = late.lease()
        for _ in range(3):
            assert worker.work().status == 200
        assert late.push(lease["task"], late.train(lease)).status == 200
        until(lambda: running.status()["t"] == 32)
        late.lease()
        run = running.server.run
        if run.checkpointer._writer is not None:
            run.checkpointer._writer.join(30)
        run.driver.ask(lambda _: None).result(30)
        shutil.copytree(folder.with_name("alive"), folder)
    return DamagedRun(folder, settings, limits)


def _lived(running: Running, updates: int) -> Worker:
    """A little fleet: one worker that works, one that leaves, one that is quarantined, and one that asks in vain."""
    worker, leaves, bad = (Worker(running, name) for name in ("works", "leaves", "bad"))
    for _ in range(2):
        bad.push(bad.lease()["task"], b"garbage")
    assert running.status()["quarantined"] == 1
    running.call("DELETE", f"/v1/workers/{leaves.number}", headers=leaves.session)
    for t in range(1, updates + 1):
        assert worker.work(1.0 if t % 3 else -0.5).status == 200
        _reached(running, "t", t)
        if t % 9 == 0:
            _reached(running, "metrics_t", t)
    return worker


def _reached(running: Running, name: str, t: int) -> None:
    until(lambda: running.status()[name] == t)


def simulated_run(folder: Path) -> DamagedRun:
    folder.mkdir()
    (folder / "line.py").write_text(LINE.read_text())
    offbeat.simulate(str(folder / "line.py"), dir=folder / "run", **SIMULATED)
    return DamagedRun(folder, SIMULATED)


# --- damage ----------------------------------------------------------------------------------------------------------


def damages(name: str, data: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    """A file cut off at some lengths, and with one bit flipped at `count` places: the first, the last, and between."""
    size = len(data)
    for length in sorted({0, 1, size // 3, size // 2, size - 1}):
        if 0 <= length < size:
            yield f"cut to {length} of {size}", data[:length]
    drawn = random.Random(f"{name} {size}")  # noqa: S311 (the same places every time)
    places = {0, size - 1, *(size * i // count for i in range(count))} if size > count else set(range(size))
    for place in sorted(places - {-1}):
        bit = drawn.randrange(8)
        flipped = bytearray(data)
        flipped[place] ^= 1 << bit
        yield f"bit {bit} of byte {place} of {size}", bytes(flipped)


# --- what is found, and what is read ---------------------------------------------------------------------------------


def told_by_verify(run: DamagedRun) -> str:
    """What `verify` says is wrong; empty where nothing is. A refusal of all of it counts as said."""
    try:
        facts = verify(run.run)
    except OffbeatError as error:
        return str(error)
    return "" if facts["agrees"] else sentence(facts)


def told_by_start(run: DamagedRun) -> tuple[str, Any]:
    """Why a start is refused, or empty and what it starts with. The folder is not the same afterwards."""
    try:
        return "", _started(run) if run.limits is not None else _resumed(run)
    except OffbeatError as error:
        return str(error), None


def _started(run: DamagedRun) -> Any:
    loop = asyncio.new_event_loop()
    options = ServeOptions(
        str(run.folder / "line.py"),
        run.run,
        Settings.of({"epochs": 1000, **run.settings}),
        ServerSettings(**{"port": 0, **(run.limits or {})}),
    )
    try:
        server = Server(options, loop)
        try:
            c, kept = server.run.coordinator, server.run.kept
            best = None if c.outcome.best_t is None else kept.of(c.outcome.best_t)
            return {
                "state": snapshot(c),
                "x": server.run.mixer.x.vector.tobytes().hex(),
                "w": server.run.mixer.w.vector.tobytes().hex(),
                "waiting": [str(order) for order in server.run._waiting],
                "best": None if best is None else best.vector.tobytes().hex(),
                "sessions": [str(session) for session in server.context.sessions.all()],
                "metrics": server.context.metrics.staleness(),
                "run": [server.begun.run_id, asdict(server.begun.about), str(server.begun.ends)],
                "head": server.run.ledger.head.hex(),
                "verbose": server.run.ledger.verbose,
            }
        finally:
            server._parts.close()
    finally:
        loop.close()


def _resumed(run: DamagedRun) -> Any:
    """Extend a finished simulation: that reads its checkpoint and everything before."""
    settings = Settings.of({**run.settings, "epochs": run.settings["epochs"] + 4, "target": None})
    simulation = Simulation.of(str(run.folder / "line.py"), settings, folder=run.run)
    run_ = simulation.run()
    changing = ("wall_s", "dir", "ledger_head")
    return {name: value for name, value in run_.summary.items() if name not in changing}


def read_by_others(run: DamagedRun) -> Any:
    """What page, report, export and people read of the folder, a piece at a time; refusals are what they say."""
    folder = run.run
    pieces = {
        "settings": lambda: dict(RunFolder.open(folder).settings),
        "summary": lambda: RunFolder.open(folder).summary,
        "rows": lambda: _rows(folder),
        "about": lambda: read_json(folder / "run.json") if (folder / "run.json").exists() else None,
        "curve": lambda: read_curve(folder / CURVE) if (folder / CURVE).exists() else None,
        "contribution": lambda: (folder / CONTRIBUTION).read_text() if (folder / CONTRIBUTION).exists() else None,
        "where": lambda: read_json(folder / "server.json") if (folder / "server.json").exists() else None,
        "x": partial(_exported, folder, "latest"),
        "result": partial(_exported, folder, "result"),
        "best": partial(_exported, folder, "best"),
    }
    return {name: _said(piece) for name, piece in pieces.items()}


def _said(piece: Any) -> Any:
    try:
        return json.loads(json.dumps(piece(), default=str))
    except Exception as error:
        return f"{type(error).__name__}"


def _rows(folder: Path) -> Any:
    """Chatter that no redo needs any more is left out: it may be gone, or not yet."""
    oldest = min((int(file.stem) for file in folder.glob("checkpoints/*.json")), default=0)
    with RunFolder.open(folder).ledger() as ledger:
        rows = [list(row) for row in ledger.rows() if row.kind not in CHATTER or row.sequence > oldest]
        return [*rows, *(str(decision) for decision in ledger.decisions())]


def _exported(folder: Path, epoch: str) -> Any:
    t, found = _of_folder(folder, epoch)
    if isinstance(found, Model):
        return [t, found.vector.tobytes().hex()]
    return [t, {name: array.tobytes().hex() for name, array in sorted(dict(found).items())}]  # type: ignore[arg-type]
