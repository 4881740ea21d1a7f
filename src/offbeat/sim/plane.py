"""Owns the arrays of a simulated run: what mixing changes, the versions in use, trainings in flight, device states."""

from collections.abc import Callable, Iterator, Mapping, Set
from math import isfinite
from typing import NamedTuple

from offbeat.core.kernel import Updater
from offbeat.core.layout import Model
from offbeat.core.rules import Average, Rule, VectorStep, with_average
from offbeat.core.vectors import Kept, Order, Standing, Vectors
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Decision, Evaluated, Lease, Spent, UpdateArrived
from offbeat.protocol.plan import Plan
from offbeat.sim.device_states import NO_STATES, DeviceStates
from offbeat.sim.executors import Executor, Job, PendingEvaluation
from offbeat.task import DeviceState, Update, Work


class EvaluatedModels(NamedTuple):
    """The evaluations of a version, and of the averaged model where there is one."""

    version: PendingEvaluation
    mean: PendingEvaluation | None

    @property
    def models(self) -> "KeptModels":
        return KeptModels(self.version.x, None if self.mean is None else self.mean.x)

    @property
    def awaited(self) -> PendingEvaluation | None:
        return next((one for one in self if one is not None and not one.done), None)

    def metrics(self) -> Mapping[str, float]:
        if self.version.metrics is None:
            raise AssertionError("metrics were used before they were there")
        if self.mean is None or self.mean.metrics is None:
            return self.version.metrics
        return with_average(self.version.metrics, self.mean.metrics)


def refreshing(task: object) -> Callable[[Model, Model, Model, float, int], None] | None:
    """What a task does to w when an update is mixed; None where it does nothing, so that w need not be copied."""
    refresh: Callable[[Model, Model, Model, float, int], None] | None = getattr(task, "refresh", None)
    return refresh if getattr(task, "batch_norm", None) in (None, "newest") else None


class KeptModels(NamedTuple):
    """A version, and the averaged model up to it where there is one."""

    x: Model
    mean: Model | None


class Plane:
    """Starts trainings from the newest version, mixes what comes back, publishes."""

    def __init__(
        self,
        x_0: Model,
        needs: Coordinator | Rule,
        executor: Executor,
        updater: Updater,
        *,
        seed: int,
        average: Average | None = None,
        kept: Kept = lambda _cache, vector: vector,
    ) -> None:
        """`needs` says what must be known about an update: the coordinator, or a rule where there is no gate.

        `kept` takes a rule's vector of a device to where it is kept.
        """
        self.executor, self.updater, self.seed = executor, updater, seed
        self.needs_distance = needs.needs_distance if isinstance(needs, Coordinator) else needs.measures_base
        self.rule = needs.rule if isinstance(needs, Coordinator) else needs
        self.plan = needs.plan if isinstance(needs, Coordinator) else Plan()
        self.vectors = Vectors(Standing.first(x_0, average), updater, average, kept=kept)
        self._states = DeviceStates(executor.task)
        self._refresh = refreshing(executor.task)
        self._leased: dict[int, tuple[int, Model]] = {}
        """The version that every lease started from, and its model."""
        self._jobs: dict[int, Job] = {}
        self._evaluations: dict[int, EvaluatedModels] = {}
        self._measured = (0, KeptModels(x_0, self.mean))
        """The version that was evaluated last, and its models."""
        self._kept: dict[int, KeptModels] = {}
        """Versions that are wanted though newer ones are there."""

    @property
    def w(self) -> Model:
        return self.vectors.w

    @property
    def x(self) -> Model:
        return self.vectors.x

    @property
    def mean(self) -> Model | None:
        """The averaged model, where there is one."""
        return self.vectors.mean

    def lease(self, lease: Lease) -> None:
        """Remember which model goes with this lease; a lease that is sent again keeps its own."""
        self._leased.setdefault(lease.task, (lease.tau, self.vectors.standing.x))

    def start(self, lease: Lease) -> None:
        if lease.task not in self._jobs:
            self._train(lease, self._states.of(lease.device))

    def _train(self, lease: Lease, state: DeviceState | None) -> None:
        work = Work(lease.device, lease.number, self.seed, lease.local_iterations, lease.gamma)
        self._jobs[lease.task] = self.executor.submit(self._leased[lease.task][1], work, state)

    def awaited_training(self, lease: Lease) -> Job | None:
        """The training that must be done before this lease's update can arrive, if it is not done yet."""
        job = self._jobs.get(lease.task)
        return job if job is not None and not job.done else None

    def arrived(self, lease: Lease, at: float, spent: Spent | None) -> UpdateArrived:
        """What the data plane sees of an update; one whose task is over already is only announced again."""
        job = self._jobs.get(lease.task)
        if job is None:
            return UpdateArrived(at, lease.worker, lease.task, samples=1, gradients=0)
        update = _done(job)
        x_new, distance = update.x_new.vector, None
        dots = self.vectors.dots(self.rule.dots, update.x_new, job.x_tau) if self.rule.dots else None
        if self.needs_distance:
            distance, largest = self.updater.measured(x_new, job.x_tau.vector)
            finite = isfinite(distance)
        else:
            largest = self.updater.largest(x_new)
            finite = isfinite(largest)
        excess = self.plan.excess(largest)
        numbers = (update.trained.samples, update.trained.gradients, finite, distance)
        return UpdateArrived(at, lease.worker, lease.task, *numbers, spent=spent, largest=excess, dots=dots)

    def commit(self, decision: Decision) -> None:
        """This update is applied, now or when it is mixed: its device keeps what the training brought."""
        job = self._jobs[decision.lease.task]
        if job.state is not None and (brought := _done(job).state) is not None:
            self._states.commit(decision.lease.device, job.state, brought)

    def mix(self, decision: Decision) -> None:
        job = self._jobs[decision.lease.task]
        mix, refresh = decision.mix, self._refresh
        if mix is None:
            return
        t, x_new = decision.t if mix.publish else None, _done(job).x_new
        if refresh is None:
            self.vectors.apply((Order(mix, x_new, job.x_tau, t),))
            return
        before = self.w
        self.vectors.apply((Order(mix, x_new, job.x_tau),))
        if self.w.vector is not before.vector:
            self.vectors.change(lambda w: refresh(w, before, job.x_tau, mix.new, decision.gradients))
        if t is not None:
            self.vectors.apply((Order(publishes=t),))

    def close(self, t: int, closing: tuple[VectorStep, ...]) -> None:
        """Publish a version that no update completes."""
        self.vectors.apply((Order(publishes=t, closing=closing),))

    def forget(self, task: int) -> None:
        job = self._jobs.pop(task, None)
        if job is not None and job.update is None:
            self.executor.cancel(job)
        self._leased.pop(task, None)

    def cancel_trainings(self) -> None:
        """Nothing of this run is trained along with others any more; one that is batched can still be asked for."""
        for job in self._jobs.values():
            if not job.done:
                self.executor.cancel(job)

    def models(self) -> dict[str, Model]:
        """The models of a checkpoint: what mixing changes, and the versions that are trained from or evaluated."""
        evaluated = {t: one.models for t, one in self._evaluations.items()} | self._kept
        used = dict(self._leased.values()) | {t: one.x for t, one in evaluated.items()}
        means = {f"mean {t}": one.mean for t, one in evaluated.items() if one.mean is not None}
        return self.vectors.models() | means | {f"version {t}": model for t, model in used.items()}

    def states(self) -> dict[str, DeviceState]:
        """The states of a checkpoint: those of the devices, and those that tasks in flight started from."""
        jobs = self._jobs.items()
        return self._states.saved({task: (job.work.device, job.state) for task, job in jobs if job.state is not None})

    def restore(
        self, models: Mapping[str, Model], replayed: "Replayed", states: Mapping[str, DeviceState] = NO_STATES
    ) -> None:
        """Take the vectors of a checkpoint, and start again what was being trained and evaluated."""
        models = {name: model.freeze() for name, model in models.items()}
        self.vectors.restore(models)
        leased = replayed.leased.values()
        self._leased = {lease.task: (lease.tau, models[f"version {lease.tau}"]) for lease in leased}
        started = self._states.restore(states)
        for lease in replayed.started.values():
            self._train(lease, started.get(lease.task, self._states.of(lease.device)))
        self._evaluations = {
            t: self._evaluation(models[f"version {t}"], models.get(f"mean {t}")) for t in replayed.evaluated
        }
        self._kept = {
            t: KeptModels(models[f"version {t}"], models.get(f"mean {t}"))
            for t in replayed.kept
            if f"version {t}" in models
        }

    def evaluate(self, t: int) -> None:
        self._evaluations[t] = self._evaluation(self.x, self.mean)

    def _evaluation(self, x: Model, mean: Model | None) -> EvaluatedModels:
        return EvaluatedModels(self.executor.measure(x), None if mean is None else self.executor.measure(mean))

    def awaited_evaluation(self, t: int) -> PendingEvaluation | None:
        return self._evaluations[t].awaited

    def metrics(self, t: int) -> Mapping[str, float]:
        """The results of this version's evaluation; they are forgotten then."""
        evaluation = self._evaluations.pop(t)
        self._measured = (t, evaluation.models)
        return evaluation.metrics()

    def keep(self, t: int, kept: Set[int]) -> None:
        """Version t was evaluated just now: keep these versions, and let go of the others."""
        there = self._kept | ({t: self._measured[1]} if self._measured[0] == t else {})
        self._kept = {t: there[t] for t in kept if t in there}

    def version(self, t: int, newest: int) -> KeptModels | None:
        """A version that was kept, or the newest."""
        return KeptModels(self.x, self.mean) if t == newest else self._kept.get(t)


def _done(job: Job) -> Update:
    if job.update is None:
        raise AssertionError("a result was used before it was there")
    return job.update


class Replayed:
    """A plane without vectors, which leads an interrupted run back to its checkpoint.

    The coordinator and the source are deterministic, so their state needs no saving: they are led through the recorded
    events again. The plane answers what was recorded, and remembers what was under way; nothing is trained.
    """

    def __init__(self, arrivals: Iterator[UpdateArrived], evaluations: Iterator[Evaluated]) -> None:
        self._arrivals, self._evaluations = arrivals, evaluations
        self.leased: dict[int, Lease] = {}
        self.started: dict[int, Lease] = {}
        self.evaluated: dict[int, None] = {}
        self.kept: Set[int] = frozenset()

    def lease(self, lease: Lease) -> None:
        self.leased.setdefault(lease.task, lease)

    def start(self, lease: Lease) -> None:
        self.started[lease.task] = lease

    def awaited_training(self, lease: Lease) -> Job | None:  # noqa: ARG002 (nothing is trained)
        return None

    def arrived(self, lease: Lease, at: float, spent: Spent | None) -> UpdateArrived:  # noqa: ARG002 (it is recorded)
        return next(self._arrivals)

    def commit(self, decision: Decision) -> None:
        """The checkpoint has the states."""

    def mix(self, decision: Decision) -> None:
        """Nothing to mix."""

    def close(self, t: int, closing: tuple[VectorStep, ...]) -> None:
        """Nothing to publish."""

    def forget(self, task: int) -> None:
        self.leased.pop(task, None)
        self.started.pop(task, None)

    def evaluate(self, t: int) -> None:
        self.evaluated[t] = None

    def awaited_evaluation(self, t: int) -> PendingEvaluation | None:  # noqa: ARG002 (nothing is evaluated)
        return None

    def metrics(self, t: int) -> Mapping[str, float]:
        del self.evaluated[t]
        return next(self._evaluations).metrics

    def keep(self, t: int, kept: Set[int]) -> None:  # noqa: ARG002 (it has no models)
        self.kept = kept
