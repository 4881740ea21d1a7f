"""Owns the replay of a served run from its files: a checkpoint, the ledger's coefficients, and the updates.

Rules kept here:
- Nothing is decided anew: recorded coefficients are applied to recorded updates, in their order.
- An update is applied when its bytes were found to be those that were acknowledged; that is looked at on all cores.
- It only reads, so it may look at a run that is being served.
- What it needs in memory is bounded by the model: see `replay_bases.py`.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Set
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from offbeat.core.kernel import Updater
from offbeat.core.layout import Model, Vector, layout_from
from offbeat.core.rules import average_from_spec, uses_base
from offbeat.core.vectors import Standing, Vectors
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Decision, MixUpdate, PublishVersion
from offbeat.server.mixer import Mixer, MixOrder, next_pass, published_by, without_update
from offbeat.server.replay_bases import Bases
from offbeat.server.update_store import NO_LIMIT, UpdateStore
from offbeat.server.version_store import VersionStore
from offbeat.storage.checkpoints import Checkpoint, Checkpoints
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.recorded_steps import closing_in
from offbeat.storage.rows import as_decision
from offbeat.storage.run_folder import LEDGER, X_0, RunFolder
from offbeat.wire import BadPayload, mapped, unload

NO_AVERAGE = "{} holds no averaged model: it was not run with --average poly:P or ema:C"
PASS_MAX = 3
"""Updates that are mixed in one pass: each of them is in memory for it."""
LOOKED_AT, AHEAD = 8, 4
"""Updates whose digests a thread looks at in one go, and how many goes ahead of the mixing."""


@dataclass
class ReplayPoint:
    standing: Standing
    t: int
    applied: int
    caches: Mapping[int, Vector] = field(default_factory=dict)

    @property
    def x(self) -> Model:
        return self.standing.x


class Replay:
    def __init__(self, folder: Path) -> None:
        self.folder, self.about = folder, RunFolder.open(folder)
        if not (folder / "layout.json").is_file():
            raise InvalidValue(f"{folder} is not the folder of a served run: it has no layout.json")
        self.layout = layout_from(read_json(folder / "layout.json"))
        self.checkpoints = Checkpoints(folder / "checkpoints", self.layout, Disk())
        self.updates = UpdateStore(folder / "updates", self.layout, Disk())
        self.versions = VersionStore(folder / "versions", self.layout, Disk(), on_disk=(folder / "versions").is_dir())
        self.average = average_from_spec(self.about.settings.get("average") or "none")
        self.updater = Updater()
        self.unlike: set[int] = set()
        """Versions whose files hold other bits than a replay gives."""

    def run(
        self, checkpoint: Checkpoint, until: int = NO_LIMIT, enough: Callable[[ReplayPoint], bool] | None = None
    ) -> ReplayPoint:
        """Apply what was decided after a checkpoint, up to a row of the ledger, or until it is `enough`."""
        at = start_of(checkpoint)
        with ExitStack() as stack:
            ledger = stack.enter_context(Ledger.open(self.folder / LEDGER, read_only=True))
            lost = {row.decision for row in ledger.rows("lost")}
            published = {row.t for row in ledger.rows("published") if row.sequence <= until}
            bases = stack.enter_context(closing(Bases(self.versions, _last_uses(ledger, checkpoint, until))))
            vectors = Vectors(at.standing, self.updater, self.average, at.caches)
            closings = {row.t: closing_in(row.detail) for row in ledger.rows("group_closed")}
            mixing = ReplayMixing(at, bases, vectors, self.updates.mapped, one_by_one=enough is not None)
            bases.offer(at.t, at.x)

            def closed(t: int) -> PublishVersion:
                return PublishVersion(t, closings.get(t, ()))

            for decision in self._whole(ledger, applied_since(ledger, checkpoint, until), lost):
                if decision.t - 1 > at.t and decision.t - 1 in published:
                    mixing.put(closed(decision.t - 1))  # a group that was published with what had arrived
                publishes = decision.mix is not None and decision.mix.publish
                if decision.sequence not in lost:
                    mixing.put(MixUpdate(decision))
                elif publishes:
                    mixing.put(without_update(decision))
                at.applied += 1
                if enough is not None and enough(at):
                    return at
            if published and max(t for t in published if t is not None) > at.t:
                mixing.put(closed(at.t + 1))
            mixing.finish()
            self.unlike |= set(bases.unlike)
        return at

    def _whole(self, ledger: Ledger, decisions: Iterator[Decision], lost: Set[int | None]) -> Iterator[Decision]:
        """The decisions, each when its update was found to be what was acknowledged; some are looked at ahead."""
        with ThreadPoolExecutor(os.cpu_count() or 1, "digests") as pool:
            ahead: deque[tuple[list[Decision], Future[None]]] = deque()
            try:
                while some := list(islice(decisions, LOOKED_AT)):
                    tasks = [d.lease.task for d in some if d.sequence not in lost]
                    wanted = {task: _acknowledged(ledger, task) for task in tasks}
                    ahead.append((some, pool.submit(self._refuse_others, wanted)))
                    if len(ahead) > AHEAD:
                        yield from _looked_at(*ahead.popleft())
                while ahead:
                    yield from _looked_at(*ahead.popleft())
            finally:
                pool.shutdown(cancel_futures=True)

    def _refuse_others(self, wanted: Mapping[int, list[str]]) -> None:
        """On a thread: every update must have one of its digests."""
        for task, digests in wanted.items():
            if not self.updates.holds(task, digests):
                raise BadPayload(f"{self.updates.whole(task)} does not hold what was acknowledged")

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
        return Checkpoint(0, {"t": 0, "mixed": 0}, Standing.first(x))

    def mean_of(self, standing: Standing) -> Model | None:
        """The averaged model; None where the run keeps none. A checkpoint holds it where it is another than x."""
        return None if self.average is None else standing.x if standing.mean is None else standing.mean

    def close(self) -> None:
        self.updater.close()


class ReplayMixing:
    """Applies orders as the server's mixer does, several in one pass where that needs little memory."""

    def __init__(
        self,
        at: ReplayPoint,
        bases: Bases,
        vectors: Vectors,
        update_of: Callable[[int], Model],
        *,
        one_by_one: bool,
    ) -> None:
        self._at, self._bases, self._one_by_one = at, bases, one_by_one
        self._mixer = Mixer(vectors, update_of, bases.of, lambda _: None)
        self._waiting: deque[MixOrder] = deque()

    def put(self, order: MixOrder) -> None:
        self._waiting.append(order)
        t = published_by(order)
        needs = isinstance(order, MixUpdate) and order.decision.mix is not None and uses_base(order.decision.mix)
        self._at.t = self._at.t if t is None else t
        if t is not None and (self._one_by_one or needs or self._bases.wants(t)):
            self.finish()
            self._bases.offer(t, self._at.x)
        elif len(self._waiting) >= PASS_MAX:
            self._pass()

    def finish(self) -> None:
        """Apply all that waits."""
        while self._waiting:
            self._pass()

    def _pass(self) -> None:
        orders, before = next_pass(self._waiting, PASS_MAX), self._mixer.w
        self._mixer.apply(orders)
        unload([before.vector], at_least=0)  # a checkpoint, which others still hold
        self._at.standing, self._at.caches = self._mixer.vectors.standing, self._mixer.vectors.caches
        for order in orders:
            if isinstance(order, MixUpdate):
                self._bases.used_by(order.decision)


def _acknowledged(ledger: Ledger, task: int) -> list[str]:
    """The digests of what came for a task."""
    details = ledger.select("SELECT detail FROM events WHERE task = ? AND kind = 'arrived'", (task,))
    return [json.loads(detail or "{}").get("digest", "") for (detail,) in details]


def _looked_at(decisions: list[Decision], done: "Future[None]") -> list[Decision]:
    done.result()
    return decisions


def start_of(checkpoint: Checkpoint) -> ReplayPoint:
    return ReplayPoint(checkpoint.standing, checkpoint.state["t"], checkpoint.state["mixed"], dict(checkpoint.caches))


def applied_since(ledger: Ledger, checkpoint: Checkpoint, until: int) -> Iterator[Decision]:
    """The applied decisions that are not in a checkpoint, up to a row of the ledger."""
    rows = (row for row in ledger.rows("decided") if row.sequence <= until and row.keep is not None)
    return map(as_decision, islice(rows, checkpoint.state["mixed"], None))


def _last_uses(ledger: Ledger, checkpoint: Checkpoint, until: int) -> dict[int, int]:
    """By tau: the number of the last decision that uses x_tau."""
    decisions = applied_since(ledger, checkpoint, until)
    return {d.lease.tau: d.sequence for d in decisions if d.mix is not None and uses_base(d.mix)}


def model_at(folder: Path, epoch: str, *, average: bool = False) -> tuple[int, Model]:
    """A version, or the averaged model up to it, and its epoch."""
    with closing(Replay(folder)) as replay:
        if epoch == "latest":
            point = replay.run(replay.checkpoints.newest())
            t, standing = point.t, point.standing
        elif epoch.isdecimal():
            t, standing = int(epoch), reached(replay, int(epoch))
        else:
            raise InvalidValue(f"epoch is {epoch!r} but must be a whole number, or latest")
        mean = replay.mean_of(standing)
        if average and mean is None:
            raise InvalidValue(NO_AVERAGE.format(folder))
        return t, standing.x if not average or mean is None else mean


def reached(replay: Replay, t: int) -> Standing:
    """The vectors when version t was published."""
    for checkpoint in replay.checkpoints.usable():
        if checkpoint.state["t"] == t:
            return checkpoint.standing
        if checkpoint.state["t"] < t:
            point = replay.run(checkpoint, enough=lambda point: point.t >= t)
            if point.t == t:
                return point.standing
            raise InvalidValue(f"there is no version {t}; the newest is {point.t}")
    raise InvalidValue(f"version {t} is gone; serve with --keep-updates all to keep every one")


def sha256(model: Model) -> str:
    return hashlib.sha256(model.vector.data).hexdigest()
