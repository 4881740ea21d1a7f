"""A cluster that stands in for Ray: processes that do what they are asked when they are listened to, and that are lost
by the dice. What goes in and out is pickled, as it is on its way to another node."""

import pickle
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from math import inf
from typing import Any, NamedTuple

import numpy as np

from offbeat.hosting.task_host import Bare
from offbeat.sim.on_ray.cluster import Cluster, RemoteCall, RemoteCallLost
from offbeat.sim.on_ray.on_node import be_ready


class Reference:
    """A value in the object store; all who read it read the same, and cannot write."""

    def __init__(self, value: Any) -> None:
        self.value = value
        for array in (value.vector, *value.carried.values()) if isinstance(value, Bare) else [value]:
            array.flags.writeable = False


class Remote(NamedTuple):
    """A function that any process does, or a method of the one that is named."""

    do: Callable[..., Any]
    process: "Process | None" = None


class Process:
    """A process on some node, perhaps with an actor, and the calls that it has not done yet."""

    def __init__(self, made: Any = None) -> None:
        self.made, self.is_lost = made, False
        self.calls: deque[tuple[RemoteCall, Remote, tuple[Any, ...]]] = deque()


class StandIn(Cluster):
    """So many places, and the chance that a process is lost at any call."""

    def __init__(self, places: int = 3, *, loss: float = 0.0, lost_max: float = inf, seed: int = 0) -> None:
        self.count, self.loss, self.lost_max, self.rng = places, loss, lost_max, np.random.default_rng(seed)
        self.processes = [Process() for _ in range(places)]
        """Those that do functions; a new one takes the place of one that is lost."""
        self.actors: list[Process] = []
        self.hired: list[tuple[Any, ...]] = []
        self.store: weakref.WeakSet[Reference] = weakref.WeakSet()
        self.puts = self.lost = self.waiting_max = self.answered = 0
        self.log: list[tuple[int, str]] = []
        """Which process did what."""
        self.is_closed = False
        self._results: dict[RemoteCall, tuple[bytes, bytes]] = {}
        self._of: dict[RemoteCall, Process] = {}
        self._waiting: set[RemoteCall] = set()

    def connect(self, _address: str | None) -> "StandIn":
        return self

    def resources(self) -> dict[str, float]:
        return {"CPU": self.count}

    def function(self, do: Callable[..., Any], gpus: float = 0.0) -> Remote:  # noqa: ARG002
        return Remote(do)

    def actor(self, kind: type, *arguments: Any) -> Process:
        self.hired.append(arguments)
        actor = Process(kind(*_sent(arguments)))
        self.actors.append(actor)
        return actor

    def method(self, actor: Process, name: str) -> Remote:
        return Remote(getattr(actor.made, name), actor)

    def put(self, value: Any) -> Reference:
        reference = Reference(_sent(value))
        if isinstance(value, Bare):
            self.puts += 1
            self.store.add(reference)
        return reference

    def call(self, remote: Remote, *arguments: Any) -> RemoteCall:
        call = RemoteCall(object(), object())
        self._give(call, remote, arguments)
        if remote.process is None and arguments[0] is not be_ready:
            self._waiting.add(call)
            self.waiting_max = max(self.waiting_max, len(self._waiting))
        return call

    def _give(self, call: RemoteCall, remote: Remote, arguments: tuple[Any, ...]) -> None:
        self._of[call] = remote.process or min(self.processes, key=lambda process: len(process.calls))
        self._of[call].calls.append((call, remote, arguments))

    def ended(self, calls: Sequence[RemoteCall], wait_s: float) -> list[RemoteCall]:
        """Some processes, at least one if that is waited for, do the next of their calls."""
        working = [process for process in dict.fromkeys(self._of[call] for call in calls) if process.calls]
        for process in working:
            if self.rng.random() < 0.5 or (wait_s and process is working[-1]):
                self._work(process)
        return [call for call in calls if call in self._results or self._of[call].is_lost]

    def _work(self, process: Process) -> None:
        if process.is_lost:
            return
        if self.rng.random() < self.loss and self.lost < self.lost_max:
            self.lose(process)
            return
        call, remote, arguments = process.calls[0]
        received = [argument.value if isinstance(argument, Reference) else _sent(argument) for argument in arguments]
        try:
            error, answer = remote.do(*received)
        except Gone:
            self.lose(process)
            return
        if not process.calls:
            return  # it was lost in the middle
        process.calls.popleft()
        among = self.processes if remote.process is None else self.actors
        done = remote.do if remote.process else arguments[0]
        self.log.append((among.index(process), done.__name__))
        self._results[call] = (pickle.dumps(error), pickle.dumps(answer))

    def lose(self, process: Process) -> None:
        """The process is gone, with what it did and all answers that it kept; what had not begun goes to others."""
        process.is_lost = True
        self.lost += 1
        self._waiting = {call for call in self._waiting if self._of[call] is not process}
        if process in self.processes:
            self.processes[self.processes.index(process)] = Process()
            for call, remote, arguments in [*process.calls][1:]:
                self._give(call, remote, arguments)
        process.calls.clear()
        if hasattr(process.made, "stop"):
            process.made.stop()

    def error(self, call: RemoteCall) -> Exception | None:
        return self._kept(call, 0)  # type: ignore[no-any-return]

    def answer(self, call: RemoteCall) -> Any:
        self._waiting.discard(call)
        self.answered += 1
        return self._kept(call, 1)

    def _kept(self, call: RemoteCall, place: int) -> Any:
        if self._of[call].is_lost:
            raise RemoteCallLost("the node is gone")
        return _read(self._results[call][place])

    def cancel(self, call: RemoteCall) -> None:
        process = self._of[call]
        process.calls = deque(given for given in process.calls if given[0] != call)

    def end_actor(self, actor: Process) -> None:
        actor.is_lost = True

    def close(self) -> None:
        self.is_closed = True


class Gone(BaseException):
    """Raised by a task that takes its process with it."""


def _sent(value: Any) -> Any:
    return _read(pickle.dumps(value))


def _read(value: bytes) -> Any:
    return pickle.loads(value)  # noqa: S301 (written here)
