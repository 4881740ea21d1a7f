"""Owns the replay of a served run from its files: a checkpoint, the ledger's coefficients, and the updates.

Rules kept here:
- Nothing is decided anew: recorded coefficients are applied to recorded updates, one after the other.
- It only reads, so it may look at a run that is being served.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.protocol.messages import Decision
from offbeat.server.checkpoints import Checkpoint, Checkpoints
from offbeat.server.run import EVERYTHING, layout_from
from offbeat.server.updates import Updates
from offbeat.server.versions import Versions
from offbeat.storage.disk import Disk
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival, as_decision
from offbeat.storage.run_folder import FINAL, LEDGER, RunFolder
from offbeat.wire import BadPayload, mapped


@dataclass
class State:
    """Where a replay stands."""

    w: Model
    x: Model
    t: int
    applied: int


class Replay:
    """The files of one served run, to be read."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, RunFolder.open(folder)
        if not (folder / "layout.json").is_file():
            raise InvalidValue(f"{folder} is not the folder of a served run: it has no layout.json")
        self.layout = layout_from(json.loads((folder / "layout.json").read_bytes()))
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, Disk())
        self.updates = Updates(folder / "updates", self.layout, Disk(), bytes_max=EVERYTHING)
        self.versions = Versions(folder / "versions", self.layout, Disk(), on_disk=(folder / "versions").is_dir())
        self.updater = Updater()

    def checkpoint(self, *, newest: bool) -> Checkpoint:
        """The newest, or the oldest that is kept."""
        usable = list(self.checkpoints.usable())
        if not usable:
            raise OffbeatError(f"{self.checkpoints.path} holds no checkpoint that can be read; restore one from a copy")
        return usable[0 if newest else -1]

    def run(
        self, checkpoint: Checkpoint, until: int = EVERYTHING, seen: Callable[[State], bool] = lambda _: False
    ) -> State:
        """Apply what was decided after a checkpoint, up to a row of the ledger, or until `seen` has seen enough."""
        state = State(checkpoint.w, checkpoint.x, checkpoint.state["t"], checkpoint.state["mixed"])
        known: dict[int, Model] = {state.t: state.x}
        with Ledger.open(self.folder / LEDGER, read_only=True) as ledger:
            lost = {row.decision for row in ledger.rows("lost")}
            published = {row.t for row in ledger.rows("published") if row.sequence <= until}
            for decision in self._since(ledger, checkpoint, until):
                if decision.t - 1 > state.t and decision.t - 1 in published:
                    self._publish(state, known, decision.t - 1)  # a group that was published with what had arrived
                if decision.sequence not in lost:
                    self._apply(ledger, state, known, decision)
                state.applied += 1
                if decision.mix is not None and decision.mix.publish:
                    self._publish(state, known, decision.t)
                if seen(state):
                    return state
            if published and max(t for t in published if t is not None) > state.t:
                self._publish(state, known, state.t + 1)
        return state

    def _since(self, ledger: Ledger, checkpoint: Checkpoint, until: int) -> list[Decision]:
        rows = (row for row in ledger.rows("decided") if row.sequence <= until)
        return [d for d in map(as_decision, rows) if d.mix is not None][checkpoint.state["mixed"] :]

    def _apply(self, ledger: Ledger, state: State, known: dict[int, Model], decision: Decision) -> None:
        task, mix = decision.lease.task, decision.mix
        arrivals = [as_arrival(row).digest for row in ledger.rows("arrived", task=task)]
        if self.updates.digest(task) not in arrivals:
            raise BadPayload(f"{self.updates.whole(task)} does not hold what was acknowledged")
        base = None
        if mix is None:
            return
        if mix.base:
            tau = decision.lease.tau
            base = known[tau] if tau in known else self.versions.of(tau)
        state.w = mixed(self.updater, state.w, mix, self.updates.mapped(task), base).freeze()

    def _publish(self, state: State, known: dict[int, Model], t: int) -> None:
        state.x, state.t = state.w, t
        if self.versions.on_disk:
            known[t] = state.x

    def close(self) -> None:
        """Done."""
        self.updater.close()


def verify(folder: Path) -> dict[str, Any]:
    """Replay from the oldest kept checkpoint, and compare with what the server has, bit for bit."""
    replay = Replay(folder)
    try:
        newest = replay.checkpoint(newest=True)
        running = replay.about.state == "running"
        until = newest.mark if running else EVERYTHING
        there = State(newest.w, newest.x, newest.state["t"], newest.state["mixed"]) if running else replay.run(newest)
        again = replay.run(replay.checkpoint(newest=False), until)
        x = mapped(folder / FINAL, replay.layout) if (folder / FINAL).is_file() else there.x
        with Ledger.open(folder / LEDGER, read_only=True) as ledger:
            decided = sum(1 for row in ledger.rows("decided") if row.keep is not None and row.sequence <= until)
    finally:
        replay.close()
    theirs, ours = sha256(x), sha256(again.x)
    return {
        "t": again.t,
        "applied": again.applied,
        "decided": decided,
        "x_sha256": theirs,
        "replay_sha256": ours,
        "from_t": replay.checkpoint(newest=False).state["t"],
        "agrees": theirs == ours and there.t == again.t and there.applied == again.applied,
    }


def model_at(folder: Path, epoch: str) -> tuple[int, Model]:
    """A version of a served run, from its files."""
    replay = Replay(folder)
    try:
        if epoch == "latest":
            state = replay.run(replay.checkpoint(newest=True))
            return state.t, state.x
        if not epoch.isdecimal():
            raise InvalidValue(f"epoch is {epoch!r} but must be a whole number, or latest")
        return int(epoch), _reached(replay, int(epoch))
    finally:
        replay.close()


def _reached(replay: Replay, t: int) -> Model:
    for checkpoint in replay.checkpoints.usable():
        if checkpoint.state["t"] == t:
            return checkpoint.x
        if checkpoint.state["t"] < t:
            state = replay.run(checkpoint, seen=lambda state: state.t >= t)
            if state.t == t:
                return state.x
            raise InvalidValue(f"there is no version {t}; the newest is {state.t}")
    raise InvalidValue(f"version {t} is gone; serve with --keep-updates all to keep every one")


def sha256(model: Model) -> str:
    """Of a model's vector."""
    return hashlib.sha256(model.vector.data).hexdigest()
