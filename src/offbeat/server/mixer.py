"""Owns the mixing on real time: a thread that applies decisions in their order and publishes what comes out.

Rules kept here:
- It never decides: it applies recorded coefficients to the update that lies on the disk, in the order of the decisions.
- Several that wait are mixed in one pass over memory, into a fresh buffer: readers of older versions go on.
- Updates are read from their files a few megabytes at a time: eight large ones are never in memory at once.
- Of the versions that one pass makes, the newest can be read; the others were never there.
- The buffer of a version is used again when the last view of it is gone. Pulls, the mixer and an evaluation hold views,
  so a version never changes under a reader, and memory follows what is really read.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from time import perf_counter
from typing import NamedTuple

from offbeat.core.layout import Model, Vector
from offbeat.core.rules import Steps, uses_base
from offbeat.core.vectors import Order, Standing, Vectors
from offbeat.protocol.messages import Decision, MixUpdate, PublishVersion
from offbeat.wire import unload

MixOrder = MixUpdate | PublishVersion
PASS_MAX = 8
"""Updates mixed in one pass: more gain nothing, and pulls would wait longer for a version."""


class Mixed(NamedTuple):
    sequences: tuple[int, ...]
    t: int | None
    """The version that can be read from now on, if there is a new one."""
    standing: Standing
    """How the vectors stand now."""
    caches: Mapping[int, Vector]
    """The vectors of devices that were written."""


class Mixer:
    """Mixes one pass at a time, on a thread of its own once it is started."""

    def __init__(
        self,
        vectors: Vectors,
        update_of: Callable[[int], Model],
        version_of: Callable[[int], Model],
        done: Callable[[Mixed | BaseException], None],
        on_pass: Callable[[int, float], None] = lambda _updates, _seconds: None,
    ) -> None:
        """`update_of` a task and `version_of` a tau give models.

        `done` gets the result of every pass, or what went wrong; `on_pass` hears how many updates it mixed, and how
        long it took. Both are called on the thread.
        """
        self.vectors = vectors
        self._update_of, self._version_of = update_of, version_of
        self._done, self._on_pass = done, on_pass
        self._orders: SimpleQueue[MixOrder | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name="mixer", daemon=True)

    @property
    def w(self) -> Model:
        return self.vectors.w

    @property
    def x(self) -> Model:
        return self.vectors.x

    def start(self) -> None:
        self._thread.start()

    def put(self, order: MixOrder) -> None:
        self._orders.put(order)

    def stop(self) -> None:
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join()

    def apply(self, orders: Sequence[MixOrder]) -> Mixed:
        made = [self._order(order) for order in orders]
        read = [model.vector for order in made for model in (order.x_new, order.x_tau) if model is not None]
        self.vectors.apply(made, between=lambda: unload(read))
        sequences = tuple(order.decision.sequence for order in orders if isinstance(order, MixUpdate))
        published = [order.publishes for order in made if order.publishes is not None]
        caches, self.vectors.changed = self.vectors.changed, {}
        return Mixed(sequences, published[-1] if published else None, self.vectors.standing, caches)

    def _order(self, order: MixOrder) -> Order:
        """An order with the models that it needs."""
        if isinstance(order, PublishVersion):
            return Order(publishes=order.t, closing=order.closing)
        mix, lease = order.decision.mix, order.decision.lease
        if mix is None:
            raise AssertionError("a refused update is never mixed")
        x_tau = self._version_of(lease.tau) if uses_base(mix) else None
        return Order(mix, self._update_of(lease.task), x_tau, published_by(order))

    def _live(self) -> None:
        waiting: deque[MixOrder] = deque()
        more = True
        while more or waiting:
            more = more and self._take(waiting)
            orders = next_pass(waiting)
            if not orders:
                continue
            try:
                begun = perf_counter()
                mixed = self.apply(orders)
                self._on_pass(len(mixed.sequences), perf_counter() - begun)
                self._done(mixed)
            except BaseException as error:
                self._done(error)
                return

    def _take(self, waiting: deque[MixOrder]) -> bool:
        """Take what is there, and wait for it where nothing is; False when nothing more will come."""
        while not waiting or (len(waiting) < PASS_MAX and not self._orders.empty()):
            order = self._orders.get()
            if order is None:
                return False
            waiting.append(order)
        return True


def next_pass(waiting: deque[MixOrder], most: int = PASS_MAX) -> list[MixOrder]:
    """The orders of the next pass, taken out: up to the last that publishes, so that w is that version after it."""
    count = min(len(waiting), most)
    last = max((i for i in range(count) if published_by(waiting[i]) is not None), default=count - 1)
    return [waiting.popleft() for _ in range(last + 1)]


def published_by(order: MixOrder) -> int | None:
    """The version that is published when this order is done, if one is."""
    if isinstance(order, PublishVersion):
        return order.t
    return order.decision.t if order.decision.mix is not None and order.decision.mix.publish else None


def without_update(decision: Decision) -> PublishVersion:
    """The version that a decision publishes, without its update, which is lost: the publication runs all the same."""
    return PublishVersion(decision.t, decision.mix.closing if isinstance(decision.mix, Steps) else ())
