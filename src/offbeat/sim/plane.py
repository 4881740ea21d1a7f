"""Owns the vectors of a simulated run: the working vector w, the newest version, and the trainings in flight."""

from collections.abc import Iterator, Mapping, Set
from math import isfinite

from offbeat.core.kernel import Updater, mixed
from offbeat.core.layout import Model
from offbeat.core.rules import Rule
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Decision, Evaluated, Lease, Spent, UpdateArrived
from offbeat.protocol.plan import Plan
from offbeat.sim.executors import Executor, Job, PendingEvaluation
from offbeat.task import Update, Work


class Plane:
    """Starts trainings from the newest version, mixes what comes back, publishes."""

    def __init__(
        self, x_0: Model, needs: Coordinator | Rule, executor: Executor, updater: Updater, *, seed: int
    ) -> None:
        """`needs` says what must be known about an update: the coordinator, or a rule where there is no gate."""
        self.executor, self.updater, self.seed = executor, updater, seed
        self.needs_distance = needs.needs_distance
        self.plan = needs.plan if isinstance(needs, Coordinator) else Plan()
        self.w = self.x = x_0
        self._leased: dict[int, tuple[int, Model]] = {}
        """The version that every lease started from, and its model."""
        self._jobs: dict[int, Job] = {}
        self._evaluations: dict[int, PendingEvaluation] = {}
        self._measured: tuple[int, Model] = (0, x_0)
        """The version that was evaluated last, and its model."""
        self._kept: dict[int, Model] = {}
        """Versions that are wanted though newer ones are there."""

    def lease(self, lease: Lease) -> None:
        """Remember which model goes with this lease; a lease that is sent again keeps its own."""
        self._leased.setdefault(lease.task, (lease.tau, self.x))

    def start(self, lease: Lease) -> None:
        if lease.task not in self._jobs:
            work = Work(lease.device, lease.number, self.seed, lease.local_iterations, lease.gamma)
            self._jobs[lease.task] = self.executor.submit(self._leased[lease.task][1], work)

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
        if self.needs_distance:
            distance, largest = self.updater.measured(x_new, job.x_tau.vector)
            finite = isfinite(distance)
        else:
            largest = self.updater.largest(x_new)
            finite = isfinite(largest)
        excess = self.plan.excess(largest)
        numbers = (update.trained.samples, update.trained.gradients, finite, distance)
        return UpdateArrived(at, lease.worker, lease.task, *numbers, spent=spent, largest=excess)

    def mix(self, decision: Decision) -> None:
        job = self._jobs[decision.lease.task]
        mix, refresh = decision.mix, getattr(self.executor.task, "refresh", None)
        if mix is None:
            return
        w = mixed(self.updater, self.w, mix, _done(job).x_new, job.x_tau if mix.base else None)
        if refresh is not None:
            refresh(w, self.w, job.x_tau, mix.new, decision.gradients)
        self.w = w.freeze()

    def publish(self) -> None:
        self.x = self.w

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
        """The models of a checkpoint: w, the newest version, and the versions that are trained from or evaluated."""
        used = self._kept | dict(self._leased.values()) | {t: job.x for t, job in self._evaluations.items()}
        return {"w": self.w, "x": self.x} | {f"version {t}": model for t, model in used.items()}

    def restore(self, models: Mapping[str, Model], replayed: "Replayed") -> None:
        """Take the vectors of a checkpoint, and start again what was being trained and evaluated."""
        models = {name: model.freeze() for name, model in models.items()}
        self.w, self.x = models["w"], models["x"]
        leased = replayed.leased.values()
        self._leased = {lease.task: (lease.tau, models[f"version {lease.tau}"]) for lease in leased}
        for lease in replayed.started.values():
            self.start(lease)
        self._evaluations = {t: self.executor.measure(models[f"version {t}"]) for t in replayed.evaluated}
        self._kept = {t: models[f"version {t}"] for t in replayed.kept if f"version {t}" in models}

    def evaluate(self, t: int) -> None:
        self._evaluations[t] = self.executor.measure(self.x)

    def awaited_evaluation(self, t: int) -> PendingEvaluation | None:
        return None if self._evaluations[t].done else self._evaluations[t]

    def metrics(self, t: int) -> Mapping[str, float]:
        """The results of this version's evaluation; they are forgotten then."""
        evaluation = self._evaluations.pop(t)
        self._measured = (t, evaluation.x)
        if evaluation.metrics is None:
            raise AssertionError("metrics were used before they were there")
        return evaluation.metrics

    def keep(self, t: int, kept: Set[int]) -> None:
        """Version t was evaluated just now: keep these versions, and let go of the others."""
        there = self._kept | ({t: self._measured[1]} if self._measured[0] == t else {})
        self._kept = {t: there[t] for t in kept if t in there}

    def version(self, t: int, newest: int) -> Model | None:
        """A version that was kept, or the newest."""
        return self.x if t == newest else self._kept.get(t)


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

    def mix(self, decision: Decision) -> None:
        """Nothing to mix."""

    def publish(self) -> None:
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
