"""Owns where simulated events come from: a fleet of devices, or the paper's sampled staleness.

A source says what happens in the world: who joins, when a task's update arrives, who asks again. It decides nothing;
the coordinator does, and it does not know that the world is simulated.
"""

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import NamedTuple, Protocol

from offbeat.core import draws
from offbeat.core.rules import Rule
from offbeat.core.rules.trial import tried
from offbeat.errors import InvalidValue
from offbeat.method import DEVICES
from offbeat.protocol import messages
from offbeat.settings import Settings
from offbeat.sim.devices import DeviceModel, device_model
from offbeat.task import Task, Work

LOST, STALENESS, DEVICE, RETRY = 0x6C6F_7374, 0x7374_616C, 0x6465_7669, 0x7265_7472
ATTEMPT_BITS = 20


class Arrival(NamedTuple):
    """An update reaches the server at this moment; the engine adds what the data plane knows about it."""

    at: float
    lease: messages.Lease
    spent: messages.Spent | None = None
    """Where links take time."""


Happening = messages.Event | Arrival


class EventSource(Protocol):
    def opening(self) -> Iterator[Happening]:
        """What happens at time 0."""

    def started(self, lease: messages.Lease, at: float) -> Iterable[Happening]:
        """What follows from sending this task now; no `Arrival` among it means that the task is lost."""

    def answered(self, answer: messages.AnswerPush, at: float) -> Iterable[Happening]:
        """What follows from the server's answer."""

    def revoked(self, lease: messages.Lease, at: float) -> Iterable[Happening]:
        """What follows when the worker hears that its task is not wanted any more."""

    def extended(self, epochs: float) -> Iterator[Happening]:
        """What follows when the run is to go on to this many epochs."""

    def available(self, worker: int, at: float) -> bool:
        """Can this worker take a task now?"""


class SimulatedFleet:
    """n devices with speeds, links, availability and dropout of their own."""

    def __init__(
        self,
        size: int,
        model: DeviceModel,
        *,
        seed: int,
        tasks_per_device: int = 1,
        model_bytes: int = 0,
        amount: Callable[[messages.Lease], float] = lambda _: 1.0,
    ) -> None:
        """`amount` is the work of a task relative to an ordinary one. A device has a worker for each of its tasks."""
        self.size, self.model, self.seed = size, model, seed
        self.workers, self.model_bytes, self.amount = size * tasks_per_device, model_bytes, amount
        self._busy_until: dict[int, float] = {}
        self._pushed: dict[int, Arrival] = {}
        """Tasks whose update is on its way, to be pushed again where the server is busy."""
        self._away: set[int] = set()
        """Workers that lost their task and will ask again by themselves."""
        self._attempts: dict[int, int] = {}
        """How often a worker lost the task that it has."""
        self._turned_away = 0

    def opening(self) -> Iterator[Happening]:
        yield messages.FleetJoined(0.0, self.workers, self.size)

    def started(self, lease: messages.Lease, at: float) -> Iterable[Happening]:
        """Download, compute, upload; or the device is lost on the way, and asks again when it is back."""
        down, up = self.model.link(lease.device)
        compute_s = self.model.compute_s(lease.device, lease.number) * self.amount(lease)
        download_s, upload_s = self.model_bytes / down, self.model_bytes / up
        done = at + download_s + compute_s + upload_s
        away = self.model.available_until(lease.device, at)
        unlucky = self._unlucky(lease)
        if away < done or unlucky:
            self._attempts[lease.worker] = self._attempts.get(lease.worker, 0) + 1
            back = self.model.available_from(lease.device, done if unlucky else max(away, at))
            self._busy_until[lease.worker] = back
            self._away.add(lease.worker)
            return (messages.TaskRequested(back, lease.worker),)
        self._busy_until[lease.worker] = done
        self._away.discard(lease.worker)
        spent = messages.Spent(download_s, compute_s, upload_s) if download_s or upload_s else None
        self._pushed[lease.task] = arrival = Arrival(done, lease, spent)
        return (arrival,)

    def answered(self, answer: messages.AnswerPush, at: float) -> Iterable[Happening]:
        """A worker that was told to come back pushes again; any other asks for its next task."""
        if answer.outcome is messages.Outcome.BUSY:
            return (self._pushed[answer.task]._replace(at=at + self._patience(answer)),)
        self._pushed.pop(answer.task, None)
        return (self._free(answer.worker, at),)

    def revoked(self, lease: messages.Lease, at: float) -> Iterable[Happening]:
        """The worker stops, and asks for another task; one that is away will ask when it is back."""
        self._pushed.pop(lease.task, None)
        return () if lease.worker in self._away else (self._free(lease.worker, at),)

    def extended(self, epochs: float) -> Iterator[Happening]:  # noqa: ARG002 (devices do not know of an end)
        """Nothing: every device goes on with what it does."""
        return iter(())

    def _patience(self, answer: messages.AnswerPush) -> float:
        """About as long as the server said, for each a little different, so that they do not all come back at once."""
        self._turned_away += 1
        jitter = draws.uniform(self.seed, RETRY, answer.task, self._turned_away)
        return (answer.retry_after_s or 1.0) * (0.5 + jitter)

    def _unlucky(self, lease: messages.Lease) -> bool:
        """Is the task lost? Drawn for this device, task and attempt, so another device changes nothing about it."""
        risk = self.model.dropout(lease.device)
        if not risk:
            return False
        key = (lease.number << ATTEMPT_BITS) + self._attempts.get(lease.worker, 0)
        return draws.uniform(self.seed, LOST, lease.device, key) < risk

    def _free(self, worker: int, at: float) -> Happening:
        self._attempts.pop(worker, None)
        self._busy_until.pop(worker, None)
        return messages.TaskRequested(at, worker)

    def available(self, worker: int, at: float) -> bool:
        """Its device is there, and not busy with a task that the server has given up on."""
        return self._busy_until.get(worker, -inf) <= at < self.model.available_until(worker % self.size, at)


class SampledStaleness:
    """The paper's own set-up: the staleness of every epoch is drawn uniformly, and so is the device.

    The task of epoch t starts at time t-1-s, when x_{t-1-s} is the newest, and arrives at time t. Worker t exists for
    that one task, so a device may have several at once.
    """

    def __init__(self, size: int, staleness_max: int, *, seed: int, epochs: float = inf) -> None:
        """`staleness_max` is the paper's: its staleness of 1..K is 0..K-1 here."""
        self.size, self.window, self.seed, self.epochs = size, staleness_max, seed, epochs
        self._moment = 0
        """The last whose tasks have begun."""

    def staleness(self, t: int) -> int:
        return draws.below(min(t, self.window), self.seed, STALENESS, t)

    def device(self, t: int) -> int:
        return draws.below(self.size, self.seed, DEVICE, t)

    def opening(self) -> Iterator[Happening]:
        return self._starting(0)

    def started(self, lease: messages.Lease, at: float) -> Iterator[Happening]:  # noqa: ARG002 (its end was fixed before)
        yield Arrival(float(lease.worker), lease)

    def answered(self, answer: messages.AnswerPush, at: float) -> Iterator[Happening]:
        """Epoch t is done: its worker goes, and the tasks that start from x_t begin."""
        yield messages.WorkerLeft(at, answer.worker)
        yield from self._starting(answer.worker)

    def revoked(self, lease: messages.Lease, at: float) -> Iterator[Happening]:
        yield messages.WorkerLeft(at, lease.worker)

    def extended(self, epochs: float) -> Iterator[Happening]:
        """Tasks of later epochs that would have begun before begin now, from the newest version: theirs is gone."""
        before, self.epochs, moment = self.epochs, epochs, self._moment
        last = min(moment + self.window, epochs)
        for t in range(int(before) + 1 if before < inf else 0, int(last) + 1) if before < last else ():
            if t - 1 - self.staleness(t) <= moment:
                yield from self._started(t, moment)

    def available(self, worker: int, at: float) -> bool:  # noqa: ARG002 (they exist when they are needed)
        return True

    def _starting(self, moment: int) -> Iterator[Happening]:
        self._moment = moment
        for t in range(moment + 1, moment + self.window + 1):
            if t <= self.epochs and t - 1 - self.staleness(t) == moment:
                yield from self._started(t, moment)

    def _started(self, t: int, moment: int) -> Iterator[Happening]:
        yield messages.WorkerJoined(float(moment), t, self.device(t))
        yield messages.TaskRequested(float(moment), t)


# --- from the settings ------------------------------------------------------------------------------------------------


def window_of(settings: Settings) -> int | None:
    name, _, rest = settings.device_model.partition(":")
    if name != "sampled":
        return None
    if not rest.isdecimal() or int(rest) < 1:
        raise InvalidValue(f"device_model {settings.device_model!r}: K in sampled:K must be a whole number >= 1")
    return int(rest)


def source_of(
    task: Task, settings: Settings, rule: Rule, devices: int, model_bytes: int, epochs: int | None
) -> EventSource:
    window = window_of(settings)
    if window is not None:
        _refuse_with_sampled(settings, rule)
        return SampledStaleness(devices, window, seed=settings.seed, epochs=inf if epochs is None else epochs)
    if not 0 <= settings.mix_s < inf:
        raise InvalidValue(f"mix_s is {settings.mix_s!r} but must be >= 0 seconds")
    if settings.on_one_machine:
        return SimulatedFleet(
            1, device_model("constant", settings.seed), seed=settings.seed, amount=_amount(task, 1, settings)
        )
    model = device_model(
        settings.device_model,
        settings.seed,
        down_mbps=settings.down_mbps,
        up_mbps=settings.up_mbps,
        availability=settings.availability,
        availability_period_s=settings.availability_period_s,
        dropout=settings.dropout or None,
    )
    return SimulatedFleet(
        devices,
        model,
        seed=settings.seed,
        tasks_per_device=settings.tasks_per_device,
        model_bytes=model_bytes,
        amount=_amount(task, devices, settings),
    )


NOT_SAMPLED = (
    *("staleness_policy", "trigger_every_s", "dropout", "availability", "down_mbps", "up_mbps", "in_flight_max"),
    *("tasks_per_device", "mix_s", "over_selection", "group_deadline_s"),
)
"""Settings that mean nothing where every arrival is one epoch, and no worker waits or is lost."""


def _refuse_with_sampled(settings: Settings, rule: Rule) -> None:
    plain = Settings()
    if rule.group or rule.staleness_max is not None or not tried(rule).publishes_always:
        raise InvalidValue(
            f"device_model sampled:K draws the staleness of every epoch; rule {settings.rule} has no such"
        )
    if settings.scheduler == "shuffled":
        raise InvalidValue(
            "device_model sampled:K draws the device of every epoch; scheduler shuffled has no say in it"
        )
    for name in NOT_SAMPLED:
        if getattr(settings, name) != getattr(plain, name):
            raise InvalidValue(f"device_model sampled:K leaves no room for {name}; leave it out")


def _amount(task: Task, devices: int, settings: Settings) -> Callable[[messages.Lease], float]:
    """The work of a task relative to the mean over (some of) the devices, where the task can tell."""
    iterations, seed = getattr(task, "iterations", None), settings.seed
    if iterations is None:
        return lambda _: 1.0
    some = range(min(devices, DEVICES))
    ordinary = getattr(task, "ordinary_iterations", None)
    if ordinary is None:
        ordinary = sum(iterations(Work(device, seed=seed)) for device in some) / len(some)

    def amount(lease: messages.Lease) -> float:
        work = Work(lease.device, lease.number, seed, lease.local_iterations, lease.gamma)
        return float(iterations(work) / ordinary)

    return amount
