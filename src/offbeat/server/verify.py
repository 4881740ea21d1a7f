"""Owns the replay of a served run from its files: a checkpoint, the ledger's coefficients, and the updates.

Rules kept here:
- Nothing is decided anew: recorded coefficients are applied to recorded updates, one after the other.
- It only reads, so it may look at a run that is being served.
- Of the versions that it makes, it holds those that a later update started from, and lets each go after its last use.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model, layout_from
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Decision
from offbeat.server.update_store import NO_LIMIT, UpdateStore
from offbeat.server.version_store import VersionGone, VersionStore
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival, as_decision
from offbeat.storage.run_folder import FINAL, LEDGER, RunFolder
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
        self.layout = layout_from(json.loads((folder / "layout.json").read_bytes()))
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, Disk())
        self.updates = UpdateStore(folder / "updates", self.layout, Disk())
        self.versions = VersionStore(folder / "versions", self.layout, Disk(), on_disk=(folder / "versions").is_dir())
        self.updater = Updater()

    def run(
        self, checkpoint: Checkpoint, until: int = NO_LIMIT, enough: Callable[[ReplayPoint], bool] = lambda _: False
    ) -> ReplayPoint:
        """Apply what was decided after a checkpoint, up to a row of the ledger, or until it is `enough`."""
        at = start_of(checkpoint)
        with Ledger.open(self.folder / LEDGER, read_only=True) as ledger:
            lost = {row.decision for row in ledger.rows("lost")}
            published = {row.t for row in ledger.rows("published") if row.sequence <= until}
            bases = Bases(self.versions, _last_uses(applied_since(ledger, checkpoint, until)))
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

    def _apply(self, ledger: Ledger, at: ReplayPoint, bases: "Bases", decision: Decision) -> None:
        task, mix = decision.lease.task, decision.mix
        arrivals = [as_arrival(row).digest for row in ledger.rows("arrived", task=task)]
        if self.updates.digest(task) not in arrivals:
            raise BadPayload(f"{self.updates.whole(task)} does not hold what was acknowledged")
        if mix is not None:
            base = bases.of(decision.lease.tau) if mix.base else None
            at.w = mixed(self.updater, at.w, mix, self.updates.mapped(task), base).freeze()

    def _publish(self, at: ReplayPoint, bases: "Bases", t: int) -> None:
        at.x, at.t = at.w, t
        bases.offer(t, at.x)

    def close(self) -> None:
        self.updater.close()


class Bases:
    """The versions that later decisions use as x_tau: from their files where these hold the same bits, else held."""

    def __init__(self, versions: VersionStore, last_uses: dict[int, int]) -> None:
        self._versions, self._last_uses = versions, last_uses
        self.held: dict[int, Model] = {}

    def offer(self, t: int, x: Model) -> None:
        """A version was made: keep it if it will be used."""
        if t in self._last_uses:
            self.held[t] = self._file_of(t, x) or x

    def of(self, tau: int) -> Model:
        return self.held[tau] if tau in self.held else self._versions.of(tau)

    def used_by(self, decision: Decision) -> None:
        """Let go of what this decision was the last to use."""
        if self._last_uses.get(decision.lease.tau) == decision.sequence:
            self.held.pop(decision.lease.tau, None)

    def _file_of(self, t: int, x: Model) -> Model | None:
        """The version as its file has it, mapped, which takes no memory; None where it is missing or differs."""
        try:
            there = self._versions.of(t)
        except VersionGone:
            return None
        return there if np.array_equal(there.vector.view(np.uint32), x.vector.view(np.uint32)) else None


def start_of(checkpoint: Checkpoint) -> ReplayPoint:
    return ReplayPoint(checkpoint.w, checkpoint.x, checkpoint.state["t"], checkpoint.state["mixed"])


def applied_since(ledger: Ledger, checkpoint: Checkpoint, until: int) -> Iterator[Decision]:
    """The applied decisions that are not in a checkpoint, up to a row of the ledger."""
    rows = (row for row in ledger.rows("decided") if row.sequence <= until and row.keep is not None)
    return map(as_decision, islice(rows, checkpoint.state["mixed"], None))


def _last_uses(decisions: Iterator[Decision]) -> dict[int, int]:
    """By tau: the number of the last decision that uses x_tau."""
    return {d.lease.tau: d.sequence for d in decisions if d.mix is not None and d.mix.base}


def verify(folder: Path) -> dict[str, Any]:
    """Replay from the oldest kept checkpoint, and compare with what the server has, bit for bit.

    `compared` says what that is: the newest version, and where the run ended at a target, the version that reached it.
    """
    with closing(Replay(folder)) as replay:
        newest, *older = list(replay.checkpoints.usable()) or [replay.checkpoints.newest()]  # which says what is wrong
        oldest = older[-1] if older else newest
        running = replay.about.state == "running"
        until = newest.mark if running else NO_LIMIT
        there = start_of(newest) if running else replay.run(newest)
        again = replay.run(oldest, until)
        kept = KeptResult.found(replay, there.t)
        final = (folder / FINAL).is_file() and kept is None
        x = mapped(folder / FINAL, replay.layout) if final else there.x
        what = "x.safetensors" if final else "the newest version, from the newest checkpoint on,"
        with Ledger.open(folder / LEDGER, read_only=True) as ledger:
            decided = sum(1 for row in ledger.rows("decided") if row.keep is not None and row.sequence <= until)
    theirs, ours = sha256(x), sha256(again.x)
    return {
        "t": again.t,
        "applied": again.applied,
        "decided": decided,
        "x_sha256": theirs,
        "replay_sha256": ours,
        "from_t": oldest.state["t"],
        "compared": f"{what} with a replay from epoch {oldest.state['t']}" + (f"; {kept.compared}" if kept else ""),
        "agrees": theirs == ours
        and there.t == again.t
        and there.applied == again.applied
        and (kept is None or kept.agrees),
    }


class KeptResult(NamedTuple):
    """The version that reached the target of a finished run, where newer ones came after it."""

    agrees: bool
    compared: str

    @classmethod
    def found(cls, replay: Replay, newest: int) -> Self | None:
        """Compare x.safetensors with a replay of its version or, where its updates are gone, with the summary."""
        summary = replay.about.summary or {}
        t = summary.get("result_t", newest)
        if t == newest:
            return None
        theirs = sha256(mapped(replay.folder / FINAL, replay.layout))
        try:
            ours, other = sha256(_reached(replay, t)), f"a replay of version {t}, which reached the target"
        except InvalidValue:
            ours, other = summary["x_sha256"], f"the summary's digest of version {t}, whose updates are gone"
        return cls(theirs == ours == summary["x_sha256"], f"x.safetensors with {other}")


def model_at(folder: Path, epoch: str) -> tuple[int, Model]:
    with closing(Replay(folder)) as replay:
        if epoch == "latest":
            point = replay.run(replay.checkpoints.newest())
            return point.t, point.x
        if not epoch.isdecimal():
            raise InvalidValue(f"epoch is {epoch!r} but must be a whole number, or latest")
        return int(epoch), _reached(replay, int(epoch))


def _reached(replay: Replay, t: int) -> Model:
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
