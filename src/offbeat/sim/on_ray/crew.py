"""Owns who does what on a cluster: actors, the errands that each has, and those that wait for one.

Rules kept here:
- An errand is a pure function of what it is given: it does not matter who does it, nor how often it is begun.
- What an actor had when it was lost is done again by others, before anything else; a new actor takes its place as soon
  as some node has room. An errand that takes its actor with it again and again is an error.
- At most `results_max` errands are begun and not yet asked for. The one that is asked for goes first: the last place is
  kept for it, so it can always begin.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from time import monotonic
from typing import Any, Protocol

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.sim.on_ray.cluster import Call, Lost
from offbeat.sim.on_ray.trainer import refuse_other_packages
from offbeat.sim.on_ray.versions import Versions

AHEAD = 2
"""Errands that an actor has at a time, so that it need not wait for its next."""
LOST_MAX = 5
"""Actors that one errand may take with it."""
FALSE_STARTS_MAX = 5
"""Actors that may be lost before they are there, in a row and beside one for each."""
ACTOR_WAIT_S = 300.0
"""How long there may be no actor at all."""
LISTEN_S = 1.0


class State(Enum):
    """Where an errand stands."""

    WAITING = auto()
    SENT = auto()
    DONE = auto()
    OVER = auto()


@dataclass(eq=False, slots=True)
class Errand:
    """One call to an actor, whoever takes it."""

    verb: str
    models: Sequence[Model]
    """What it starts from; its last arguments."""
    arguments: tuple[Any, ...] = ()
    state: State = State.WAITING
    call: Call | None = None
    error: Exception | None = None
    answer: Any = None
    lost: int = 0
    is_dropped: bool = False


@dataclass(eq=False, slots=True)
class Member:
    """An actor, and what it was sent; it does one after the other."""

    actor: Any
    hello: Call
    is_here: bool = False
    errands: deque[Errand] = field(default_factory=deque)

    @property
    def next(self) -> Call | None:
        """What will be over next."""
        if not self.is_here:
            return self.hello
        return self.errands[0].call if self.errands else None


class Where(Protocol):
    """What a crew needs of a cluster."""

    def put(self, value: Any) -> Any: ...

    def call(self, actor: Any, verb: str, *arguments: Any) -> Call: ...

    def ended(self, calls: Sequence[Call], wait_s: float) -> list[Call]: ...

    def error(self, call: Call) -> Exception | None: ...

    def answer(self, call: Call) -> Any: ...

    def dismiss(self, actor: Any) -> None: ...


class Crew:
    """So many actors of one kind."""

    def __init__(self, cluster: Where, hire: Callable[[], Any], count: int, results_max: int) -> None:
        self._cluster, self._hire, self._results_max = cluster, hire, results_max
        self.versions, self.redone = Versions(cluster.put), 0
        self._waiting: dict[Errand, None] = {}
        self._begun: set[Errand] = set()
        """Sent, and not yet asked for."""
        self._asked_for: Errand | None = None
        self._false_starts, self._somebody_here = 0, monotonic()
        self._members = [self._hired() for _ in range(count)]

    def __len__(self) -> int:
        return len(self._members)

    @property
    def here(self) -> int:
        """How many actors are there by now."""
        return sum(member.is_here for member in self._members)

    def gather(self) -> None:
        """Wait until all are there."""
        while self.here < len(self):
            self._go_on(LISTEN_S)

    def add(self, errand: Errand) -> None:
        """Take an errand on."""
        self.versions.use(errand.models)
        self._waiting[errand] = None
        self._go_on(0.0)

    def drop(self, errand: Errand) -> None:
        """Nobody will ask for it."""
        errand.is_dropped = True
        if errand.state in (State.WAITING, State.DONE):
            self._end(errand)

    def answer(self, errand: Errand) -> Any:
        """What came of it, when it is there; raises what went wrong."""
        self._asked_for = errand
        try:
            self._go_on(0.0)
            while not self._is_fetched(errand):
                self._go_on(LISTEN_S)
        finally:
            self._asked_for = None
        self._end(errand)
        self._send()
        if errand.error is not None:
            raise errand.error
        return errand.answer

    def close(self) -> None:
        """End all actors."""
        for member in self._members:
            self._cluster.dismiss(member.actor)

    # --- errands -----------------------------------------------------------------------------------------------------

    def _go_on(self, wait_s: float) -> None:
        self._send()
        self._listen(wait_s)
        self._send()

    def _send(self) -> None:
        while (errand := self._next_errand()) is not None:
            free = [member for member in self._members if member.is_here and len(member.errands) < AHEAD]
            if not free:
                return
            member = min(free, key=lambda member: len(member.errands))
            references = self.versions.references(errand.models)
            errand.call = self._cluster.call(member.actor, errand.verb, *errand.arguments, *references)
            errand.state = State.SENT
            member.errands.append(errand)
            del self._waiting[errand]
            self._begun.add(errand)

    def _next_errand(self) -> Errand | None:
        if self._asked_for in self._waiting:
            return self._asked_for
        return next(iter(self._waiting), None) if len(self._begun) < self._results_max - 1 else None

    def _is_fetched(self, errand: Errand) -> bool:
        """Is it done, and its answer here? An answer may be lost with the node that keeps it."""
        if errand.state is not State.DONE:
            return errand.state is State.OVER
        if errand.error is None and errand.call is not None:
            try:
                errand.answer = self._cluster.answer(errand.call)
            except Lost:
                self._again([errand])
                return False
        return True

    def _again(self, errands: Iterable[Errand]) -> None:
        """Let others do what was lost, before anything else."""
        self.redone += len(again := [errand for errand in errands if not errand.is_dropped])
        for errand in errands:
            errand.state, errand.call = State.WAITING, None
            self._begun.discard(errand)
            if errand.is_dropped:
                self._end(errand)
        self._waiting = dict.fromkeys([*again, *self._waiting])

    def _end(self, errand: Errand) -> None:
        if errand.state is not State.OVER:
            errand.state, errand.call = State.OVER, None
            self._begun.discard(errand)
            self._waiting.pop(errand, None)
            self.versions.release(errand.models)

    # --- actors ------------------------------------------------------------------------------------------------------

    def _hired(self) -> Member:
        actor = self._hire()
        return Member(actor, self._cluster.call(actor, "hello"))

    def _listen(self, wait_s: float) -> None:
        """Hear what is over; whoever is lost is replaced."""
        speaking = {call: member for member in self._members if (call := member.next) is not None}
        for call in self._cluster.ended([*speaking], wait_s):
            member = speaking[call]
            try:
                self._hear(member, call)
            except Lost as lost:
                self._replace(member, lost)
        if self.here:
            self._somebody_here = monotonic()
        elif monotonic() - self._somebody_here > ACTOR_WAIT_S:
            raise OffbeatError(f"no node of the Ray cluster had room for an actor in {ACTOR_WAIT_S:.0f} s; is it busy?")

    def _hear(self, member: Member, call: Call) -> None:
        error = self._cluster.error(call)
        if not member.is_here:
            refuse_other_packages(self._cluster.answer(call))
            member.is_here, self._false_starts = True, 0
            return
        errand = member.errands.popleft()
        errand.state, errand.error = State.DONE, error
        if errand.is_dropped:
            self._end(errand)

    def _replace(self, member: Member, lost: Lost) -> None:
        if member.errands:
            self._blame(member.errands[0], lost)
        elif not member.is_here:
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS_MAX + len(self):
                raise OffbeatError(f"no actor can start on this Ray cluster; is Offbeat on every node? {lost}")
        self._again(member.errands)
        self._members[self._members.index(member)] = self._hired()

    def _blame(self, errand: Errand, lost: Lost) -> None:
        """It was being done."""
        errand.lost += 1
        if errand.lost > LOST_MAX:
            raise OffbeatError(f"a training was lost {errand.lost} times, perhaps for want of memory: {lost}")
