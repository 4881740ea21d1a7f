"""Owns what a mixing rule is: it is told facts about one update and answers with what to do to a few named vectors.

The data plane holds a working vector w, the published version x, and the vectors that a rule declares. An answer is

- a `Mix`, which is all that most rules need:  w = keep*w + new*x_new + base*x_tau,
- or `Steps`: a few elementwise operations over named vectors, one after the other.

In both, `publish` makes w the next version x_t.

Rules kept here:
- Scalar arithmetic only. A rule never sees a vector; what it may know about vectors are inner products.
- Nothing is kept on an object: a rule's memory goes in and comes out, so alpha cannot compound by accident and a
  checkpoint needs no more than that memory and the vectors.
- Staleness is derived from t and tau, which the server knows; no worker reports it.
- One rule is one aggregate (where an update goes), weights (how much it counts) and finishes (what becomes of the
  step x_t - x_{t-1} when a version is published): `compose` puts them together.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, dataclass_transform

from offbeat.errors import InvalidValue

Told = TypeVar("Told")

# --- answers ---------------------------------------------------------------------------------------------------------


class Mix(NamedTuple):
    """w = keep*w + new*x_new + base*x_tau; `publish` makes w the next version. A coefficient of 0 skips its term."""

    keep: float
    new: float
    base: float
    publish: bool


class Move(NamedTuple):
    """into = the sum of coefficient * vector, in this order; a coefficient of 0 skips its term."""

    into: str
    terms: tuple[tuple[str, float], ...]


class Product(NamedTuple):
    """into = keep*into + share*(left*right), element by element."""

    into: str
    keep: float
    share: float
    left: str
    right: str


class Larger(NamedTuple):
    """into = the larger of into and another vector, element by element."""

    into: str
    of: str


class Root(NamedTuple):
    """into = step*over / (sqrt(under) + eps), element by element; 0 where that would divide by 0."""

    into: str
    step: float
    over: str
    under: str
    eps: float


class OnParameters(NamedTuple):
    """These steps for what is trained alone: float buffers (BatchNorm's statistics) take no part in them."""

    steps: tuple["Elementwise", ...]


Elementwise = Move | Product | Larger | Root
VectorStep = Elementwise | OnParameters

WORKING, PUBLISHED, NEW, BASE, OWN = "w", "x", "new", "base", "own"
VECTORS = (WORKING, PUBLISHED, NEW, BASE, OWN, "mean")
"""Names with a meaning: w, x, x_new, x_tau, the vector that is kept for the device, and the averaged model."""
SCRATCH = "_"
"""A name that begins like this holds only for one answer, and costs no memory."""


class Steps(NamedTuple):
    """A few elementwise operations; those in `closing` belong to the publication, whatever becomes of the update."""

    keep: float
    new: float
    """What the update weighs: alpha_t, for people and for the count of who contributed how much."""
    base: float
    publish: bool
    steps: tuple[VectorStep, ...]
    closing: tuple[VectorStep, ...] = ()
    cache: int | None = None
    """Which of the vectors that are kept for devices is `own` here."""


Answer = Mix | Steps


def move(into: str, **terms: float) -> Move:
    """A `Move` as it is written on paper.

    >>> move("m", m=0.9, g=1.0)
    Move(into='m', terms=(('m', 0.9), ('g', 1.0)))
    """
    return Move(into, tuple(terms.items()))


def elementwise(steps: tuple[VectorStep, ...]) -> Iterator[Elementwise]:
    """All steps, those for parameters alone included."""
    for step in steps:
        if isinstance(step, OnParameters):
            yield from step.steps
        else:
            yield step


def read_by(step: Elementwise) -> tuple[str, ...]:
    """The vectors that a step reads."""
    match step:
        case Move():
            return tuple(name for name, coefficient in step.terms if coefficient)
        case Product():
            return (step.left, step.right, step.into) if step.keep else (step.left, step.right)
        case Larger():
            return (step.into, step.of)
        case Root():
            return (step.over, step.under)


def uses_base(answer: Answer) -> bool:
    """Does this answer need x_tau?"""
    if isinstance(answer, Mix):
        return bool(answer.base)
    return any(BASE in read_by(step) for step in elementwise(answer.steps))


# --- facts -----------------------------------------------------------------------------------------------------------


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def _facts(cls: type[Told]) -> type[Told]:
    """A dataclass that is frozen for the type checker alone: one is made for every update, and frozen it takes long."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_facts
class Facts:
    """What is known about one update when it is decided on."""

    t: int
    """The epoch that the update goes into: one more than the versions published so far."""
    tau: int
    """The epoch of the model that the worker received, from its lease."""
    device: int = 0
    samples: int = 1
    distance: float | None = None
    """||x_new - x_tau||, where the rule asked for it with `needs_distance`."""
    count: int = 1
    """Updates of this device that were applied, this one included."""
    applied: int = 1
    """Updates of all devices that were applied, this one included."""
    seen: int = 1
    """Devices of which an update was applied, this one included."""
    caches: int = 1
    """Vectors that are kept under the name `own`, this device's included."""
    weight: float = 1.0
    """The product of the rule's weights for this update."""
    dot: Mapping[str, float] = field(default_factory=dict)
    """Inner products that the rule asked for with `dots`."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau < self.t:
            raise InvalidValue(
                f"tau is {self.tau} but must lie in 0..{self.t - 1}, the versions published before epoch {self.t}"
            )
        if self.samples < 1:
            raise InvalidValue(f"samples is {self.samples} but an update needs at least one sample")

    @property
    def staleness(self) -> int:
        """Versions published between the lease and this mixing; 0 when the update is fresh."""
        return self.t - 1 - self.tau

    def weighing(self, weight: float) -> "Facts":
        """The same, with a weight; `replace` would take three times as long, for every update."""
        of_update = (self.t, self.tau, self.device, self.samples, self.distance)
        return Facts(*of_update, self.count, self.applied, self.seen, self.caches, weight, self.dot)


DOTS = {"D.D": ("D", "D"), "D.L": ("D", "L"), "L.L": ("L", "L")}
"""Inner products that a rule may ask for: D is x_new - x_tau, L is x - x_tau."""
Memory = Mapping[str, float]
"""What a rule remembers between updates: names and numbers, never changed in place."""
Formula = Callable[[Facts, Memory], tuple[Answer, Memory]]


# --- parts and wholes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Weight:
    """How much an update counts, as a factor that any rule may be given."""

    spec: str
    factor: Callable[[Facts], float] = field(repr=False, compare=False)


class Publication(NamedTuple):
    """What a finish is told about the version that is published."""

    t: int
    staleness: int
    """The largest of the updates in it."""


@dataclass(frozen=True, slots=True)
class Finisher:
    """What becomes of the step of a version: its steps read the vector `g` and leave what is to be added in it."""

    spec: str
    formula: Callable[[Publication, Memory], tuple[tuple[Elementwise, ...], Memory]] = field(repr=False, compare=False)
    slots: tuple[str, ...] = ()
    memory: Memory = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Rule:
    """A mixing rule. Write your own with `Rule("name", formula)`; `spec` is what settings and the ledger call it."""

    spec: str
    formula: Formula = field(repr=False, compare=False)
    memory: Memory = field(default_factory=dict, repr=False)
    """What the rule remembers before the first update, and again after a publication."""
    needs_base: bool = False
    """The rule uses x_tau, so leased versions must be kept."""
    needs_distance: bool = False
    """The rule reads `Facts.distance`, so every update is measured against its x_tau."""
    group: int = 0
    """How many tasks make one synchronous group; 0 is asynchronous."""
    slots: tuple[str, ...] = ()
    """Vectors that the rule keeps; they are 0 at first."""
    caches: int | None = None
    """None: no vector is kept per device. 0: one each, under the name `own`. G: one for devices alike modulo G."""
    dots: tuple[str, ...] = ()
    """Inner products that the rule reads in `Facts.dot`; such a rule decides when all before it are mixed."""
    staleness_max: int | None = None
    """Updates that are more stale than this are refused, whatever the settings say."""
    cancels: bool = False
    """A lease whose update would be too stale is cancelled, so that its worker begins anew."""
    weights: tuple[Weight, ...] = ()
    finishes: tuple[Finisher, ...] = ()
    close: Callable[[int, Memory], tuple[tuple[VectorStep, ...], Memory]] | None = field(
        default=None, repr=False, compare=False
    )
    """What a publication does that no update completes, at a group's deadline; None is nothing."""

    def __post_init__(self) -> None:
        for name in self.slots:
            if name in VECTORS or name.startswith(SCRATCH) or not name.isidentifier():
                raise InvalidValue(
                    f"rule {self.spec}: a slot cannot be called {name!r}; {', '.join(VECTORS)} are taken"
                )
        for name in self.dots:
            if name not in DOTS:
                raise InvalidValue(f"rule {self.spec} asks for {name!r}; a rule may ask for {', '.join(DOTS)}")
        if self.dots and self.group:
            raise InvalidValue(f"rule {self.spec} has groups, so it cannot ask for inner products: all of x are alike")

    @property
    def moving(self) -> bool:
        """Does the rule read a vector that mixing changes? Then updates are decided on one by one."""
        return bool(self.dots)

    @property
    def measures_base(self) -> bool:
        """Is every update measured against its x_tau?"""
        return self.needs_distance or bool(self.dots)

    def cache_of(self, device: int) -> int:
        """Which of the kept vectors is this device's `own`."""
        return device % self.caches if self.caches else device

    def decide(self, facts: Facts, memory: Memory) -> tuple[Answer, Memory]:
        if self.weights:
            facts = facts.weighing(math.prod(_positive(weight, facts) for weight in self.weights))
        answer, after = self.formula(facts, memory)
        if not (math.isfinite(answer.keep) and math.isfinite(answer.new) and math.isfinite(answer.base)):
            raise InvalidValue(f"rule {self.spec} answered {answer} to {facts}; coefficients must be finite")
        if isinstance(answer, Mix):
            needs_base = bool(answer.base)
        else:
            self._refuse_unknown(answer)
            if self.caches is not None:
                answer = answer._replace(cache=self.cache_of(facts.device))
            needs_base = uses_base(answer)
        if needs_base and not self.needs_base:
            raise InvalidValue(
                f"rule {self.spec} uses x_tau: build it with needs_base=True, so that leased versions are kept"
            )
        return answer, after

    def closed(self, t: int, memory: Memory) -> tuple[tuple[VectorStep, ...], Memory]:
        """The steps of version t, which is published without an update that completes it, and the memory after it."""
        return ((), self.memory) if self.close is None else self.close(t, memory)

    def _refuse_unknown(self, answer: Steps) -> None:
        """Every vector that is named must be there when it is read, and every number finite."""
        own = {OWN} if self.caches is not None else set[str]()
        writable = {WORKING, *self.slots}
        self._refuse_steps(answer.steps, {PUBLISHED, NEW, BASE}, writable | own)
        self._refuse_steps(answer.closing, {PUBLISHED}, writable)

    def _refuse_steps(self, steps: tuple[VectorStep, ...], inputs: set[str], writable: set[str]) -> None:
        known, of_parameters = inputs | writable, set[str]()
        for step in steps:
            partly = isinstance(step, OnParameters)
            for one in elementwise((step,)):
                self._refuse_step(one, known, of_parameters, partly=partly)
                if one.into not in writable and not one.into.startswith(SCRATCH):
                    raise InvalidValue(f"rule {self.spec} writes to {one.into!r}, which it may not: {one}")
                (of_parameters if partly else known).add(one.into)

    def _refuse_step(self, step: Elementwise, known: set[str], of_parameters: set[str], *, partly: bool) -> None:
        for name in read_by(step):
            if name not in known and not (partly and name in of_parameters):
                where = " for float buffers" if name in of_parameters else ""
                raise InvalidValue(f"rule {self.spec} reads {name!r}, which is not there{where}: {step}")
        if not all(math.isfinite(number) for number in numbers_in(step)):
            raise InvalidValue(f"rule {self.spec} answered {step}; coefficients must be finite")


def numbers_in(step: Elementwise) -> tuple[float, ...]:
    match step:
        case Move():
            return tuple(coefficient for _, coefficient in step.terms)
        case Product():
            return (step.keep, step.share)
        case Root():
            return (step.step, step.eps)
        case Larger():
            return ()


def _positive(weight: Weight, facts: Facts) -> float:
    factor = float(weight.factor(facts))
    if not 0.0 < factor < math.inf:
        raise InvalidValue(f"weight {weight.spec} is {factor!r} for {facts}; a weight must be a finite number > 0")
    return factor
