"""A cluster that stands in for Ray: actors in this process that do what they are asked when they are listened to, and
that are lost by the dice. What goes in and out is pickled, as it is on its way to another node."""

import pickle
import weakref
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Any

import numpy as np

from offbeat.hosting.task_host import Bare
from offbeat.sim.on_ray.cluster import Call, Lost


class Reference:
    """A model in the object store; all who read it read the same, and cannot write."""

    def __init__(self, value: Bare) -> None:
        self.value = value
        for array in (value.vector, *value.carried.values()):
            array.flags.writeable = False


class Actor:
    """An actor, and the calls that it has not done yet."""

    def __init__(self, made: Any) -> None:
        self.made, self.is_lost = made, False
        self.calls: deque[tuple[Call, str, tuple[Any, ...]]] = deque()


class StandIn:
    """So many places, and the chance that an actor is lost at any call."""

    def __init__(self, places: int = 3, *, loss: float = 0.0, lost_max: float = inf, seed: int = 0) -> None:
        self.count, self.loss, self.lost_max, self.rng = places, loss, lost_max, np.random.default_rng(seed)
        self.actors: list[Actor] = []
        self.hired: list[tuple[Any, ...]] = []
        self.store: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.puts = self.lost = self.waiting_max = self.answered = 0
        self.log: list[tuple[int, str]] = []
        """Which actor did what."""
        self.is_closed = False
        self._results: dict[Call, tuple[bytes, bytes]] = {}
        self._of: dict[Call, Actor] = {}
        self._waiting: set[Call] = set()

    def connect(self, _address: str | None) -> "StandIn":
        return self

    def places(self, _gpus: float) -> int:
        return self.count

    def hire(self, kind: type, *arguments: Any, gpus: float = 0.0) -> Actor:  # noqa: ARG002
        self.hired.append(arguments)
        actor = Actor(kind(*_sent(arguments)))
        self.actors.append(actor)
        return actor

    def put(self, value: Any) -> Reference:
        self.puts += 1
        self.store.add(reference := Reference(_sent(value)))
        return reference

    def call(self, actor: Actor, verb: str, *arguments: Any) -> Call:
        call = Call(object(), object())
        self._of[call] = actor
        actor.calls.append((call, verb, arguments))
        if verb in ("train", "train_many", "evaluate"):
            self._waiting.add(call)
            self.waiting_max = max(self.waiting_max, len(self._waiting))
        return call

    def ended(self, calls: Sequence[Call], wait_s: float) -> list[Call]:
        """Some actors, at least one if that is waited for, do the next of their calls."""
        working = [actor for actor in dict.fromkeys(self._of[call] for call in calls) if actor.calls]
        for actor in working:
            if self.rng.random() < 0.5 or (wait_s and actor is working[-1]):
                self._work(actor)
        return [call for call in calls if call in self._results or self._of[call].is_lost]

    def _work(self, actor: Actor) -> None:
        if actor.is_lost:
            return
        if self.rng.random() < self.loss and self.lost < self.lost_max:
            self.lose(actor)
            return
        call, verb, arguments = actor.calls.popleft()
        self.log.append((self.actors.index(actor), verb))
        received = [argument.value if isinstance(argument, Reference) else _sent(argument) for argument in arguments]
        try:
            error, answer = getattr(actor.made, verb)(*received)
        except Gone:
            self.lose(actor)
            return
        self._results[call] = (pickle.dumps(error), pickle.dumps(answer))

    def lose(self, actor: Actor) -> None:
        """The actor's node is gone, with all answers that it kept."""
        actor.is_lost = True
        actor.calls.clear()
        self.lost += 1
        self._waiting = {call for call in self._waiting if self._of[call] is not actor}
        if hasattr(actor.made, "stop"):
            actor.made.stop()

    def error(self, call: Call) -> Exception | None:
        return self._fetched(call, 0)  # type: ignore[no-any-return]

    def answer(self, call: Call) -> Any:
        self._waiting.discard(call)
        self.answered += 1
        return self._fetched(call, 1)

    def _fetched(self, call: Call, place: int) -> Any:
        if self._of[call].is_lost:
            raise Lost("the node is gone")
        return _read(self._results[call][place])

    def dismiss(self, actor: Actor) -> None:
        actor.is_lost = True

    def close(self) -> None:
        self.is_closed = True


class Gone(BaseException):
    """Raised by a task that takes its actor with it."""


def _sent(value: Any) -> Any:
    return _read(pickle.dumps(value))


def _read(value: bytes) -> Any:
    return pickle.loads(value)  # noqa: S301 (written here)
