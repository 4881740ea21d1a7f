"""Owns the replay of a served run from its files: a checkpoint, the ledger's coefficients, and the updates.

Rules kept here:
- Nothing is decided anew: recorded coefficients are applied to recorded updates, one after the other.
- It only reads, so it may look at a run that is being served.
- What it needs in memory is bounded by the model: see `replay_bases.py`.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model, layout_from
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Decision
from offbeat.server.replay_bases import Bases
from offbeat.server.update_store import NO_LIMIT, UpdateStore
from offbeat.server.version_store import VersionStore
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival, as_decision
from offbeat.storage.run_folder import LEDGER, X_0, RunFolder
from offbeat.wire import BadPayload, mapped


@dataclass
class ReplayPoint:
    w: Model
    x: Model
    t: int
    applied: int


class Replay:
    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, RunFolder.open(folder)
        if not (folder / "layout.json").is_file():
            raise InvalidValue(f"{folder} is not the folder of a served run: it has no layout.json")
        self.layout = layout_from(read_json(folder / "layout.json"))
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, Disk())
        self.updates = UpdateStore(folder / "updates", self.layout, Disk())
        self.versions = VersionStore(folder / "versions", self.layout, Disk(), on_disk=(folder / "versions").is_dir())
        self.updater = Updater()

    def run(
        self, checkpoint: Checkpoint, until: int = NO_LIMIT, enough: Callable[[ReplayPoint], bool] = lambda _: False
    ) -> ReplayPoint:
        """Apply what was decided after a checkpoint, up to a row of the ledger, or until it is `enough`."""
        at = start_of(checkpoint)
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger.open(self.folder / LEDGER, read_only=True))
            lost = {row.decision for row in ledger.rows("lost")}
            published = {row.t for row in ledger.rows("published") if row.sequence <= until}
            bases = stack.enter_context(closing(Bases(self.versions, _last_uses(ledger, checkpoint, until))))
            bases.offer(at.t, at.x)
            for decision in applied_since(ledger, checkpoint, until):
                if decision.t - 1 > at.t and decision.t - 1 in published:
                    self._publish(at, bases, decision.t - 1)  # a group that was published with what had arrived
                if decision.sequence not in lost:
                    self._apply(ledger, at, bases, decision)
                bases.used_by(decision)
                at.applied += 1
                if decision.mix is not None and decision.mix.publish:
                    self._publish(at, bases, decision.t)
                if enough(at):
                    return at
            if published and max(t for t in published if t is not None) > at.t:
                self._publish(at, bases, at.t + 1)
        return at

    def beginning(self) -> Checkpoint | None:
        """x_0 as a checkpoint, where every update since is kept; None where one is gone."""
        x_0 = self.folder / X_0
        if not x_0.is_file():
            return None
        with Ledger.open(self.folder / LEDGER, read_only=True) as ledger:
            lost = {row.decision for row in ledger.rows("lost")}
            rows = (row for row in ledger.rows("decided") if row.keep is not None and row.decision not in lost)
            if not all(self.updates.has(row.task) for row in rows if row.task is not None):
                return None
        x = mapped(x_0, self.layout)
        return Checkpoint(0, {"t": 0, "mixed": 0}, x, x)

    def _apply(self, ledger: Ledger, at: ReplayPoint, bases: Bases, decision: Decision) -> None:
        task, mix = decision.lease.task, decision.mix
        arrivals = [as_arrival(row).digest for row in ledger.rows("arrived", task=task)]
        if self.updates.digest(task) not in arrivals:
            raise BadPayload(f"{self.updates.whole(task)} does not hold what was acknowledged")
        if mix is not None:
            base = bases.of(decision.lease.tau) if mix.base else None
            at.w = mixed(self.updater, at.w, mix, self.updates.mapped(task), base).freeze()

    def _publish(self, at: ReplayPoint, bases: Bases, t: int) -> None:
        at.x, at.t = at.w, t
        bases.offer(t, at.x)

    def close(self) -> None:
        self.updater.close()


def start_of(checkpoint: Checkpoint) -> ReplayPoint:
    return ReplayPoint(checkpoint.w, checkpoint.x, checkpoint.state["t"], checkpoint.state["mixed"])


def applied_since(ledger: Ledger, checkpoint: Checkpoint, until: int) -> Iterator[Decision]:
    """The applied decisions that are not in a checkpoint, up to a row of the ledger."""
    rows = (row for row in ledger.rows("decided") if row.sequence <= until and row.keep is not None)
    return map(as_decision, islice(rows, checkpoint.state["mixed"], None))


def _last_uses(ledger: Ledger, checkpoint: Checkpoint, until: int) -> dict[int, int]:
    """By tau: the number of the last decision that uses x_tau."""
    decisions = applied_since(ledger, checkpoint, until)
    return {d.lease.tau: d.sequence for d in decisions if d.mix is not None and d.mix.base}


def model_at(folder: Path, epoch: str) -> tuple[int, Model]:
    with closing(Replay(folder)) as replay:
        if epoch == "latest":
            point = replay.run(replay.checkpoints.newest())
            return point.t, point.x
        if not epoch.isdecimal():
            raise InvalidValue(f"epoch is {epoch!r} but must be a whole number, or latest")
        return int(epoch), reached(replay, int(epoch))


def reached(replay: Replay, t: int) -> Model:
    for checkpoint in replay.checkpoints.usable():
        if checkpoint.state["t"] == t:
            return checkpoint.x
        if checkpoint.state["t"] < t:
            point = replay.run(checkpoint, enough=lambda point: point.t >= t)
            if point.t == t:
                return point.x
            raise InvalidValue(f"there is no version {t}; the newest is {point.t}")
    raise InvalidValue(f"version {t} is gone; serve with --keep-updates all to keep every one")


def sha256(model: Model) -> str:
    return hashlib.sha256(model.vector.data).hexdigest()
