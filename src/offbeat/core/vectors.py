"""Owns the vectors that mixing changes: w, the published version x, a rule's slots and caches, the averaged model.

The simulator, the server and the run on Flower's fleet mix with this, and so does every replay.

Rules kept here:
- It applies answers as they were decided, in their order, and decides nothing.
- Nothing that was handed out changes: what is written goes to a buffer of its own. So a reader, a checkpoint or a
  training may hold a vector as long as it likes.
- Several orders cost one pass over memory and give the bits of one by one.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from offbeat.core.buffer_pool import BufferPool
from offbeat.core.kernel import CHUNK, Between, Term, Updater, mixed
from offbeat.core.layout import Array, Model, Vector, aligned
from offbeat.core.rules.average import Average
from offbeat.core.rules.interface import (
    BASE,
    DOTS,
    NEW,
    OWN,
    PUBLISHED,
    SCRATCH,
    WORKING,
    Answer,
    Mix,
    Move,
    OnParameters,
    Steps,
    VectorStep,
)
from offbeat.core.step_program import OrderOutline, StepProgram, outlined, planned

MEAN, SLOT, CACHE = "mean", "slot ", "cache "
SPARE_MAX = 8
"""Free buffers that are kept: about as many as one update writes."""
NAMES_MAX = 4096
NO_SLOTS: Mapping[str, Vector] = {}


class Standing(NamedTuple):
    """The vectors at one moment, without the caches of devices; none of them changes any more."""

    w: Model
    x: Model
    slots: Mapping[str, Vector] = NO_SLOTS
    mean: Model | None = None
    """The averaged model, where there is one."""

    @classmethod
    def first(cls, x_0: Model, average: Average | None = None) -> "Standing":
        """How a run begins: a slot is 0 until it is written, and the mean of the versions is x_0."""
        return cls(x_0, x_0, NO_SLOTS, None if average is None else x_0)


class Order(NamedTuple):
    """One thing to do: mix an update, or publish a version without one."""

    answer: Answer | None = None
    x_new: Model | None = None
    x_tau: Model | None = None
    publishes: int | None = None
    """The version that is published when this is done."""
    closing: tuple[VectorStep, ...] = ()
    """What the publication does, where there is no answer that says it."""


Kept = Callable[[int, Vector], Vector]
"""Takes a cache to where it is kept, and gives it back as it lies there."""


class Vectors:
    """The vectors of one run; `standing` is how they are now."""

    def __init__(
        self,
        standing: Standing,
        updater: Updater,
        average: Average | None = None,
        caches: Mapping[int, Vector] | None = None,
        kept: Kept = lambda _cache, vector: vector,
    ) -> None:
        if average is not None and standing.mean is None:  # a checkpoint of x_0
            standing = standing._replace(mean=standing.x)
        self.standing, self.average = standing, average
        self.caches: dict[int, Vector] = dict(caches or {})
        self.changed: dict[int, Vector] = {}
        """Caches that were written since this was emptied last."""
        self._updater, self._kept = updater, kept
        self._layout = standing.w.layout
        self._pool = BufferPool(self._layout.size, spare_max=SPARE_MAX)
        self._moved: deque[tuple[int, Vector, Vector]] = deque()
        """Caches that lie elsewhere now: which, what it was, where it is."""

    @property
    def w(self) -> Model:
        return self.standing.w

    @property
    def x(self) -> Model:
        return self.standing.x

    @property
    def mean(self) -> Model | None:
        return self.standing.mean

    def apply(self, orders: Sequence[Order], between: Between | None = None) -> None:
        """Carry out orders; `between` is called between strides, when nothing is being read."""
        while self._moved:
            cache, before, after = self._moved.popleft()
            if self.caches.get(cache) is before:
                self.caches[cache] = after
        if between is None and len(orders) == 1 and self._mixed_one(orders[0]):
            return
        while orders:
            count = self._together(orders)
            self._pass(orders[:count], between)
            orders = orders[count:]

    def cache_moved(self, cache: int, before: Vector, after: Vector) -> None:
        """A cache lies elsewhere now, with the same contents. May be called on any thread."""
        self._moved.append((cache, before, after))

    def change(self, change: Callable[[Model], object]) -> None:
        """Let others change w, in a copy, before it is published."""
        w = self.standing.w.copy()
        change(w)
        self.standing = self.standing._replace(w=w.freeze())

    def dots(
        self, names: Sequence[str], x_new: Model, x_tau: Model, between: Between | None = None
    ) -> dict[str, float]:
        """Inner products that a rule asks for; everything before this update must have been mixed."""
        vectors = {"D": (x_new.vector, x_tau.vector), "L": (self.x.vector, x_tau.vector)}
        pairs = {name: DOTS[name] for name in names}
        return {name: self._updater.inner(vectors[a], vectors[b], between=between) for name, (a, b) in pairs.items()}

    def models(self) -> dict[str, Model]:
        """All vectors by name, each with what is carried beside w."""
        found = {"w": self.w, "x": self.x} | ({MEAN: self.mean} if self.mean is not None else {})
        vectors = {f"{SLOT}{name}": vector for name, vector in self.standing.slots.items()}
        vectors |= {f"{CACHE}{cache}": vector for cache, vector in self.caches.items()}
        return found | {name: Model(self._layout, vector, self.w.carried) for name, vector in vectors.items()}

    def restore(self, models: Mapping[str, Model]) -> None:
        """Go on with what `models` gave."""
        slots = {name.removeprefix(SLOT): model.vector for name, model in models.items() if name.startswith(SLOT)}
        mean = models.get(MEAN, models["x"]) if self.average is not None else None
        self.standing = Standing(models["w"], models["x"], slots, mean)
        of_caches = {name.removeprefix(CACHE): model for name, model in models.items() if name.startswith(CACHE)}
        self.caches = {int(cache): self._kept(int(cache), model.vector) for cache, model in of_caches.items()}

    def _together(self, orders: Sequence[Order]) -> int:
        """How many orders one pass can take: up to a publication, so that x is w then, and as steps read it."""
        published = 0
        for number, order in enumerate(orders, 1):
            if published and not isinstance(order.answer, Mix):
                return published
            if order.publishes is not None:
                published = number
        return published or len(orders)

    def _pass(self, orders: Sequence[Order], between: Between | None) -> None:
        mixes = self.average is None and all(isinstance(order.answer, Mix | None) for order in orders)
        if mixes and not any(order.closing for order in orders):
            self._mix([order for order in orders if order.answer is not None], between)
        else:
            self._run(orders, between)
        if any(order.publishes is not None for order in orders):
            self.standing = self.standing._replace(x=self.w)

    # --- a working vector, and its mean ------------------------------------------------------------------------------

    def _mixed_one(self, order: Order) -> bool:
        """Mix one update with no more than that takes: a simulated task is over in the time that `_run` takes."""
        mix, x_new, before = order.answer, order.x_new, self.standing
        averaged = self.average is not None and order.publishes is not None
        if not isinstance(mix, Mix) or x_new is None or (averaged and self._layout.size > CHUNK):
            return False
        buffer = self._pool.take() if self._layout.size > CHUNK else None
        w = mixed(self._updater, before.w, mix, x_new, order.x_tau if mix.base else None, buffer).freeze()
        mean = self._average(w, order.publishes) if averaged else before.mean
        self.standing = Standing(w, before.x if order.publishes is None else w, before.slots, mean)
        return True

    def _average(self, w: Model, t: int | None) -> Model:
        """The mean, moved towards version t, with the bits that `_run` would give."""
        mean, trained = self.standing.mean, self._layout.parameter_size
        if mean is None or self.average is None or t is None:
            raise AssertionError("there is an average and no mean, or no version")
        share = self.average.share(t)
        out = mixed(self._updater, mean, Mix(1.0 - share, share, 0.0, publish=False), w)
        if trained < self._layout.size:
            out.vector[trained:] = w.vector[trained:]
        return out.freeze()

    def _mix(self, orders: Sequence[Order], between: Between | None) -> None:
        if orders:
            vector, w = self._buffer(), self.standing.w
            self._updater.mix(vector, w.vector, [_term(order) for order in orders], between=between)
            out = Model(self._layout, vector, _carried(orders, w))
            self.standing = self.standing._replace(w=out.freeze())

    def _buffer(self) -> Vector:
        return aligned(self._layout.size) if self._layout.size <= CHUNK else self._pool.take()

    # --- several vectors ---------------------------------------------------------------------------------------------

    def _run(self, orders: Sequence[Order], between: Between | None) -> None:
        before, layout = self.standing, self._layout
        vectors = {WORKING: before.w.vector, PUBLISHED: before.x.vector, **before.slots}
        if before.mean is not None:
            vectors[MEAN] = before.mean.vector
        numbers, caches, outlines = list[float](), list[int](), list[OrderOutline]()
        for number, order in enumerate(orders):
            self._place(order, number, caches, vectors)
            steps, own_numbers = outlined(self._steps(order))
            numbers += own_numbers
            outlines.append(OrderOutline(steps, _names(number, _place_of(order, caches))))
        has_buffers = layout.parameter_size < layout.size
        plan = planned(tuple(outlines), frozenset(vectors), has_buffers=has_buffers)
        written = {name: self._buffer() for name in plan.writes}
        inputs = [vectors[name] for name in plan.reads]
        if written:
            program = StepProgram(plan, inputs, [*written.values()], numbers, layout.size, layout.parameter_size)
            self._updater.run(program, between=between)
        self._take(_carried(orders, before.w), written, plan.cleared, caches)

    def _place(self, order: Order, number: int, caches: list[int], vectors: dict[str, Vector]) -> None:
        """Name the vectors of one order: its update, where that began, and its device's cache if there is one."""
        if order.x_new is not None:
            vectors[f"{NEW} {number}"] = order.x_new.vector
        if order.x_tau is not None:
            vectors[f"{BASE} {number}"] = order.x_tau.vector
        cache = order.answer.cache if isinstance(order.answer, Steps) else None
        if cache is not None and cache not in caches:
            if cache in self.caches:
                vectors[f"{OWN} {len(caches)}"] = self.caches[cache]
            caches.append(cache)

    def _steps(self, order: Order) -> tuple[VectorStep, ...]:
        """What an order does to vectors, the averaged model included."""
        if order.publishes is None or self.average is None:
            return _steps(order)
        has_buffers = self._layout.parameter_size < self._layout.size
        return (*_steps(order), *averaging(self.average.share(order.publishes), has_buffers=has_buffers))

    def _take(
        self,
        carried: Mapping[str, Array],
        written: Mapping[str, Vector],
        cleared: Sequence[str],
        caches: Sequence[int],
    ) -> None:
        """Hold what was written from now on."""
        before, slots = self.standing, dict(self.standing.slots)
        for name in cleared:
            slots.pop(name, None)
        for name, vector in written.items():
            if name.startswith(f"{OWN} "):
                cache = caches[int(name.removeprefix(f"{OWN} "))]
                self.caches[cache] = self.changed[cache] = self._kept(cache, _frozen(vector))
            elif name not in (WORKING, MEAN):
                slots[name] = _frozen(vector)
        w = Model(self._layout, written.get(WORKING, before.w.vector), carried).freeze()
        mean = Model(self._layout, written[MEAN], carried).freeze() if MEAN in written else before.mean
        self.standing = Standing(w, before.x, slots, mean)


@lru_cache(NAMES_MAX)
def _names(number: int, own: int | None) -> tuple[tuple[str, str], ...]:
    """What an order calls its vectors, and what all orders of a pass call them."""
    named = ((NEW, f"{NEW} {number}"), (BASE, f"{BASE} {number}"))
    return named if own is None else (*named, (OWN, f"{OWN} {own}"))


def _place_of(order: Order, caches: Sequence[int]) -> int | None:
    cache = order.answer.cache if isinstance(order.answer, Steps) else None
    return None if cache is None else caches.index(cache)


def _term(order: Order) -> Term:
    if not isinstance(order.answer, Mix) or order.x_new is None:
        raise AssertionError("only updates that are mixed are terms")
    base = order.x_tau.vector if order.answer.base and order.x_tau is not None else None
    return Term(order.answer, order.x_new.vector, base)


def _steps(order: Order) -> tuple[VectorStep, ...]:
    """What an order does to vectors."""
    if order.answer is None:
        return order.closing
    if isinstance(order.answer, Mix):
        keep, new, base, _ = order.answer
        return (Move(WORKING, ((WORKING, keep), (NEW, new), (BASE, base))),)
    return (*order.answer.steps, *order.answer.closing)


def averaging(share: float, *, has_buffers: bool) -> tuple[VectorStep, ...]:
    """The mean moves towards w; its float buffers are those of w."""
    towards = ((MEAN, 1.0 - share), (WORKING, share))
    if not has_buffers:
        return (Move(MEAN, towards),)
    aside = f"{SCRATCH}{MEAN}"
    return (Move(aside, towards), Move(MEAN, ((WORKING, 1.0),)), OnParameters((Move(MEAN, ((aside, 1.0),)),)))


def _carried(orders: Sequence[Order], w: Model) -> Mapping[str, Array]:
    """Whole numbers follow the newest update; a copy, since an update may lie in a file that goes away."""
    newest = next((order.x_new for order in reversed(orders) if order.x_new is not None), None)
    if newest is None:
        return w.carried
    return {name: array.copy() for name, array in newest.carried.items()}


def _frozen(vector: Vector) -> Vector:
    vector.setflags(write=False)
    return vector
