"""Owns the life of a worker: it joins, and then is idle or working, as in the paper, until the run is finished.

Rules kept here:
- idle: wait until the device may train, then wait for a task. working: pull, train, keep on the disk, push.
- A training that fails is handed back and told in one line; after some in a row the worker gives up.
- A server that cannot be reached for `give_up_after` ends it; a finished update stays on the disk for the next start.
- Told to stop, it stops at once: the task is handed back or, where the update is finished, pushed if that is quick.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from time import monotonic

from offbeat.core.layout import Layout, Model
from offbeat.core.model_base import base_of
from offbeat.errors import InvalidValue, LayoutMismatch, OffbeatError
from offbeat.task import DeviceState, Task, Trained, Work, keeps_state, samples_of, start_with_frozen, train_in_place
from offbeat.worker.api_answers import Joined, LeasedTask, RequestRefused
from offbeat.worker.api_client import ApiClient, OtherRun, OwnModel
from offbeat.worker.delivery import Delivery
from offbeat.worker.eligibility import Eligibility
from offbeat.worker.heartbeat import Heartbeat
from offbeat.worker.interrupts import Interrupts, Revoked, WorkerStopped
from offbeat.worker.journal import Journal
from offbeat.worker.outbox import Outbox
from offbeat.worker.retrying import Backoff, RetryingClient, Say, ServerLost
from offbeat.worker.settings import WorkerSettings

SOON_S = 0.2
"""A server that answers sooner, without a task, is not asked again at once."""
NO_TASK = frozenset({"quarantined", "superseded"})
"""Refusals after which the worker waits and asks again."""


class GaveUp(OffbeatError):
    """Too many trainings in a row failed."""


class Worker:
    def __init__(
        self,
        client: ApiClient,
        outbox: Outbox,
        make: Callable[[Joined], Task],
        settings: WorkerSettings,
        *,
        eligibility: Eligibility | None = None,
        journal: Journal | None = None,
        backoff: Callable[[], Backoff] = Backoff,
        interrupts: Interrupts | None = None,
        say: Say = lambda _line: None,
        describe: Callable[[Exception], str] = str,
    ) -> None:
        """`make` gives the task for a run; `describe` says in one line what went wrong in it."""
        self.settings, self.say = settings, say
        self.interrupts = interrupts or Interrupts()
        self._make, self._describe = make, describe
        self._eligibility = eligibility or Eligibility()
        self._server = RetryingClient(client, self.interrupts, backoff, say, settings.give_up_after)
        self._delivery = Delivery(outbox, journal or Journal(None), self._server, say)
        self._heartbeat = Heartbeat(client.beside(), self.interrupts.revoke)
        self._failures = 0
        self._own: OwnModel
        self._samples: int | None = None
        """Those that every push claims, once they are known."""
        self._told_of_samples = False

    def run(self) -> None:
        """Work until the run is finished or the worker is told to stop; any other end is raised."""
        with self.interrupts, self._heartbeat:
            try:
                self._work()
                self._server.goodbye()
            except WorkerStopped:
                self._stop()
            except ServerLost as lost:
                raise ServerLost(f"{lost}. {self._kept()}") from lost
            except OffbeatError:
                self._server.goodbye(handing_back=self._delivery.unsent is None)
                raise
            finally:
                self._server.client.http.close()

    def _work(self) -> None:
        while True:
            self._server.task = self._delivery.held()
            joined = self._server.answered(lambda: self._server.client.join(self._server.task))
            self.say(f"joined run {joined.run} as worker {joined.worker}, for device {joined.device}")
            try:
                return self._work_for(joined)
            except OtherRun:
                self.say("the server has another run now")

    def _work_for(self, joined: Joined) -> None:
        with self._holding(self._server.task):
            self._delivery.push_held(joined)
        if joined.state == "finished":
            return self.say("the run is finished")
        task, layout = self._loaded(joined)
        self._server.answered(lambda: self._server.client.declare(self._own))
        self._samples = self._own.samples or joined.samples
        while (lease := self._leased()) is not None:
            with self._holding(lease.task):
                self._do(joined.run, task, layout, lease)
        return None

    @contextmanager
    def _holding(self, task: int | None) -> Iterator[None]:
        """The heart beats for a task; a worker that is stopped meanwhile still knows which it was."""
        self._server.task = task
        self._heartbeat.hold(task)
        try:
            yield
            self._server.task = None
        finally:
            self._heartbeat.hold(None)

    def _loaded(self, joined: Joined) -> tuple[Task, Layout]:
        try:
            with self.interrupts.allowed():
                task = self._make(joined)
                x_0, frozen = start_with_frozen(task, joined.seed)
                layout = x_0.layout
                self._own = OwnModel(self._held(task, joined.device), base_of(layout, frozen))
        except OffbeatError:
            raise
        except Exception as error:
            raise OffbeatError(self._describe(error)) from error
        if layout.fingerprint != joined.layout:
            raise LayoutMismatch(f"this task makes another model than that of the server; use its task: {joined.task}")
        return task, layout

    def _held(self, task: Task, device: int) -> int | None:
        """How many samples the device holds, where that can be known now; else the first training says it."""
        try:
            samples = samples_of(task, device)
        except Exception as error:
            self.say(f"the samples of device {device} cannot be counted yet: {self._describe(error)}")
            return None
        return samples if samples is None or samples >= 1 else None

    # --- idle --------------------------------------------------------------------------------------------------------

    def _leased(self) -> LeasedTask | None:
        """The next task; None when there will be none."""
        while True:
            self._until_eligible()
            asked_at = monotonic()
            try:
                answer = self._server.answered(self._server.client.ask)
            except RequestRefused as refused:
                if refused.error not in NO_TASK:
                    raise
                self._server.outages.wait(refused)
                continue
            if answer.state == "finished":
                self.say("the run is finished" + (f": {answer.reason}" if answer.reason else ""))
                return None
            if answer.lease is not None:
                return answer.lease
            if monotonic() - asked_at < SOON_S:
                self._server.pause()

    def _until_eligible(self) -> None:
        told = None
        while True:
            with self.interrupts.allowed():
                reason = self._eligibility.why_not()
            if reason is None:
                return
            if reason != told:
                told = reason
                self.say(f"not now: {reason}")
            self.interrupts.wait(self.settings.eligible_every_s)

    # --- working -----------------------------------------------------------------------------------------------------

    def _do(self, run: str, task: Task, layout: Layout, lease: LeasedTask) -> None:
        try:
            with self.interrupts.allowed(lease.task):
                began = monotonic()
                model = self._server.client.pull(lease, layout, self._server.outages.wait)
                self._server.outages.over()
                pulled = monotonic()
                state = self._delivery.state_of(run, lease.device) if keeps_state(task) else None
                trained, brought = self._trained(task, model, lease, state)
                spent = (pulled - began, monotonic() - pulled)
        except Revoked:
            self.say(f"task {lease.task} is not wanted any more")
        except RequestRefused as refused:
            if refused.for_good:
                raise
            self.say(f"handed task {lease.task} back: {refused.message}")
            self._server.hand_back()
            self._server.pause(free=1)  # once, a version can be gone by chance
        except ServerLost:
            raise
        except Exception as error:
            self._failed(lease.task, error)
        else:
            self._failures = 0
            self._delivery.push(self._delivery.keep(run, lease, model, trained, spent, brought))

    def _trained(
        self, task: Task, model: Model, lease: LeasedTask, state: DeviceState | None
    ) -> tuple[Trained, DeviceState | None]:
        """Train the pulled model in its place: it is the only copy."""
        work = Work(lease.device, lease.number, lease.seed, lease.local_iterations, lease.gamma)
        began = monotonic()
        reported, brought = train_in_place(task, model, work, state)
        trained = self._as_declared(_checked(reported))
        if (left := self.settings.at_least_s - (monotonic() - began)) > 0:
            self.interrupts.wait(left)
        took = f"{trained.gradients} gradients in {monotonic() - began:.1f} s"
        self.say(f"task {lease.task} on version {lease.tau}: trained {took}")
        return trained, brought

    def _as_declared(self, trained: Trained) -> Trained:
        """The number of samples is the same in every push, whatever the task counts meanwhile."""
        if self._samples is None:
            self._samples = trained.samples
        if trained.samples != self._samples and not self._told_of_samples:
            self._told_of_samples = True
            self.say(
                f"the task reports {trained.samples} samples, but this worker holds {self._samples}, which is "
                "sent; to declare another number, start it again with a task that has a method `samples`"
            )
        return trained._replace(samples=self._samples)

    def _failed(self, task: int, error: Exception) -> None:
        self._failures += 1
        self.say(f"task {task} failed: {self._describe(error)}")
        self._server.hand_back()
        if self._failures >= self.settings.failures_max:
            raise GaveUp(f"{self._failures} trainings in a row failed; mend the task, and start the worker again")
        self._server.pause()

    # --- the end -----------------------------------------------------------------------------------------------------

    def _kept(self) -> str:
        unsent = self._delivery.unsent
        if unsent is None:
            return "Start the worker again when the server is back."
        return f"The update of task {unsent.task} stays in {self._delivery.folder}; start again to push it."

    def _stop(self) -> None:
        self._delivery.push_quickly(self.settings.stop_s)
        unsent = self._delivery.unsent
        self._server.goodbye(handing_back=unsent is None)
        self.say("stopped" if unsent is None else f"stopped; the update of task {unsent.task} is pushed next time")


def _checked(trained: Trained) -> Trained:
    """What a task reports, if it can be sent; metrics that are not finite are left out."""
    samples, gradients = int(trained.samples), int(trained.gradients)
    if samples < 1 or gradients < 0:
        raise InvalidValue(f"`train` returned {trained!r}; samples must be >= 1 and gradients >= 0")
    metrics = {str(name): float(value) for name, value in trained.metrics.items()}
    return Trained(samples, gradients, {name: value for name, value in metrics.items() if isfinite(value)})
