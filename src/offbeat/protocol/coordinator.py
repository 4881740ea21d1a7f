"""Owns every decision of the server: one state machine, `handle(event) -> [command]`.

Rules kept here:
- It decides and never acts: no clock (the time is in the event), no input or output, no arrays.
- Decisions are made once, in one serial order, with their coefficients; a redo applies them and recomputes nothing.
- A lease's tau is the newest published version; staleness is counted from it to the mixing, so queued updates count.
- A task is answered once. A push that comes again gets the first answer again and changes nothing.
- A released lease frees its device, but a late push under it is still judged.
- A worker that is not heard of for `silent_s` is silent: its place goes to others, and it may get its lease back.
- While the run is paused no task is given out; everything that is open is judged.
- A quarantined worker is given no task, and its updates are refused.
- It waits for no worker: no start barrier, no fixed number of workers; they join and leave at any time.

Two parts decide on their own: the `Judge` what becomes of a pushed update, the `Dispatcher` who is given a task. What
follows from what is said here.
"""

from collections import deque
from math import inf
from typing import assert_never

from offbeat.core.rules import Answer, Rule
from offbeat.errors import InvariantBroken
from offbeat.protocol import messages
from offbeat.protocol.dispatch import Available, Dispatcher
from offbeat.protocol.ends import Ends, RunOutcome
from offbeat.protocol.judging import Judge
from offbeat.protocol.messages import Command, Decision, Event, Lease, Outcome
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler

STORY_LENGTH = 256
UNNOTICED = (messages.UpdateMixed, messages.VersionPublished)
"""Half of all events: where nobody waits and nothing ends, they change nothing that could be due."""


class Coordinator:
    """Leases, queue, admission, staleness policy and end of one run."""

    def __init__(
        self,
        rule: Rule,
        plan: Plan,
        scheduler: Scheduler | None = None,
        *,
        seed: int = 0,
        available: Available = lambda _worker, _at: True,
    ) -> None:
        self.rule, self.plan, self.scheduler = rule, plan, scheduler or Scheduler()
        self.at = 0.0
        self.t = 0
        """Versions published."""
        self.t_decided = 0
        """Versions decided on, those included that are not published yet."""
        self.applied = 0
        self.mixed = 0
        self.gradients = 0
        """Gradients in the versions decided on; those of a group count when its version does."""
        self.gradients_mixed = 0
        self.evaluated_t = 0
        """The newest version whose evaluation was asked for."""
        self.end_reason = ""
        """Why the run ends, from the moment when that is known; `finished` when all that was decided is mixed, too."""
        self.finished = False
        self.outcome = RunOutcome()
        self.judge = Judge(rule, plan)
        self.dispatcher = d = Dispatcher(plan, self.scheduler, available, seed)
        self.book, self.idle, self.evaluations = d.book, d.idle, d.evaluations
        self.leases, self.silent, self.released = self.book.open, self.book.silent, self.book.released
        self.group, self.contribution = d.group, d.contribution
        self.woken_at = inf
        """The moment of the last `WakeAt` that has not come yet."""
        self.awaits = False
        """The last event led to a command after which tasks are granted: a mixing, say."""
        self._story: deque[tuple[Event, list[Command]]] = deque(maxlen=STORY_LENGTH)
        self._commands: list[Command] = []

    # --- the one way in ----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:  # noqa: C901 (one line per kind of event)
        """Take note of what happened; answer what to do."""
        if event.at < self.at:
            raise InvariantBroken(f"the clock went back from {self.at} to {event.at}: {event}")
        self.at = event.at
        self._commands = commands = list[Command]()
        self._story.append((event, commands))
        if event.at >= self.plan.until_s:  # all else that can end a run is looked at where it changes
            self.end_if_enough()
        match event:
            case messages.UpdateArrived():
                self._arrived(event)
            case messages.TaskRequested():
                self._requested(event.worker)
            case messages.UpdateMixed():
                self._mixed(event.sequence)
            case messages.VersionPublished():
                self._published(event.t)
            case messages.TimePassed():
                self._passed()
            case messages.FleetJoined():
                self.dispatcher.add_fleet(event.size, event.devices, event.at, without=self.quarantined)
            case messages.WorkerJoined():
                self.dispatcher.device_of[event.worker] = event.device
            case messages.WorkerDeclared():
                return commands  # for the ledger: nothing has changed for those who wait, and nothing is decided by it
            case messages.WorkerLeft():
                self._left(event.worker)
            case messages.LeaseReturned():
                self._returned(event)
            case messages.RequestEnded():
                self.dispatcher.end_wait(event.worker, event.at)
            case messages.ServerRestarted():
                self.dispatcher.renew(self.at)
            case messages.LossAccepted():
                self._go_on_without(event)
            case messages.BadUpdateArrived():
                self._bad_arrived(event)
            case messages.WorkerBarred():
                if self.judge.quarantined.bar(event.worker, event.why):
                    self._quarantine(event.worker, event.why)
            case messages.WorkerReadmitted():
                self.judge.quarantined.readmit(event.worker)
            case messages.HeartbeatArrived():
                self._beat(event.task)
            case messages.RunPaused() | messages.RunResumed():
                self.dispatcher.pause(isinstance(event, messages.RunPaused))
            case messages.Evaluated():
                self._evaluated(event)
            case messages.RunExtended():
                return self._extended(event)
            case _:
                assert_never(event)
        self.awaits = bool(commands) and any(map(self._is_awaited, commands))
        if not commands and type(event) in UNNOTICED and not (self.end_reason or self.dispatcher.idle):
            return commands
        return self._settled(trigger=not self.awaits)

    def _settled(self, *, trigger: bool) -> list[Command]:
        """What follows from a change: tasks that can be given out now, the end, the next waking."""
        if self.end_reason:
            self._finish_if_done()
        elif trigger and self.dispatcher.idle:
            self._trigger()
        self._wake_next()
        return self._commands

    # --- what others may ask -----------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Updates decided on and not yet mixed."""
        return self.applied - self.mixed

    @property
    def quarantined(self) -> dict[int, str]:
        """Workers that are given no task, and why."""
        return self.judge.quarantined.reasons

    @property
    def all_refused(self) -> bool:
        """Were updates judged, and none applied?"""
        return self.judge.decisions > 0 and not self.applied

    @property
    def result(self) -> int:
        """The version that the run is about: the one that reached the target, or the newest."""
        return self.t if self.outcome.result_t is None else self.outcome.result_t

    @property
    def needs_distance(self) -> bool:
        """Every update must be measured against its x_tau."""
        return self.rule.measures_base or self.plan.gate is not None

    @property
    def needs_base(self) -> bool:
        """Updates are mixed with their x_tau, so leased versions must be kept."""
        return self.rule.needs_base or (self.plan.gate is not None and self.plan.gate.needs_base)

    @property
    def needs_evaluation(self) -> bool:
        """Decisions depend on evaluations, so a driver must not run ahead of them."""
        gamma = self.scheduler.gamma
        return self.plan.target is not None or (gamma is not None and getattr(gamma, "uses_evaluations", True))

    def latest(self, count: int) -> list[str]:
        """The latest events and the commands that answered them, a line each: errors tell them."""
        return [f"{event} -> {commands}" for event, commands in list(self._story)[-count:]]

    def _is_awaited(self, command: Command) -> bool:
        """Is it better to grant after this is done? A mixing: the next lease then starts from its result."""
        kind = type(command)
        return kind is messages.MixUpdate or (kind is messages.EvaluateModel and self.needs_evaluation)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"broken after {self.latest(1)[0]}: not so: {what}")

    # --- workers -----------------------------------------------------------------------------------------------------

    def _requested(self, worker: int) -> None:
        if self.end_reason:
            self._commands.append(messages.TellFinished(worker))
        elif worker in self.quarantined:
            self._commands.append(messages.TellQuarantined(worker, self.quarantined[worker]))
        else:
            self._heard_again(worker)
            lease = self.book.of_worker(worker)
            if lease:
                self._commands.append(messages.SendTask(lease))
            else:
                self.dispatcher.wait(worker, self.at)

    def _beat(self, task: int) -> None:
        silent = self.silent.get(task)
        if silent and not self.end_reason:
            self._heard_again(silent.worker)
        self.book.extend(task, self.at + self.plan.hold_s)

    def _heard_again(self, worker: int) -> None:
        self._commands += self.dispatcher.heard_again(worker, self.at, self.t, self.t_decided, self.queued)

    def _left(self, worker: int) -> None:
        self._commands += self.dispatcher.dismiss(worker)
        self.dispatcher.device_of.pop(worker, None)

    def _returned(self, event: messages.LeaseReturned) -> None:
        lease = self.leases.get(event.task)
        if lease and lease.worker == event.worker:
            self._commands.append(self.dispatcher.release(lease))
        elif event.task in self.silent and self.silent[event.task].worker == event.worker:
            self._commands += self.dispatcher.give_away(event.worker)

    def _bad_arrived(self, event: messages.BadUpdateArrived) -> None:
        """It counts where a push would be judged: under an open or released lease of the worker that sent it."""
        lease, _ = self.book.find(event.task)
        if lease and lease.worker == event.worker and not self.end_reason:
            self._misbehaved(event.worker, event.why)

    def _misbehaved(self, worker: int, why: str) -> None:
        if self.judge.quarantined.count_bad(worker, why):
            self._quarantine(worker, why)

    def _quarantine(self, worker: int, why: str) -> None:
        self._commands.append(messages.Quarantine(worker, why))
        self._commands += self.dispatcher.dismiss(worker, revoked=True)

    # --- updates -----------------------------------------------------------------------------------------------------

    def _arrived(self, event: messages.UpdateArrived) -> None:
        answer = self.judge.known_answer(event) or self._judged(event)
        self._commands.append(answer)
        if answer.decision and not answer.repeated:
            self.judge.answers.remember(answer)
            why = self.judge.misconduct(event, answer.outcome)
            if why:
                self._misbehaved(event.worker, why)
            self.end_if_enough()

    def _judged(self, event: messages.UpdateArrived) -> messages.AnswerPush:
        lease, revoked = self.book.find(event.task)
        if lease is None:
            return messages.AnswerPush(event.worker, event.task, Outcome.UNKNOWN_TASK)
        if lease.worker != event.worker:
            return messages.AnswerPush(event.worker, event.task, Outcome.NOT_YOURS)
        outcome = self.judge.outcome(
            event,
            ending=bool(self.end_reason),
            stale=revoked or event.base_gone or self.dispatcher.is_too_stale(lease, self.t_decided),
            queue_is_full=self.queued >= self.plan.queue_max,
        )
        if outcome is Outcome.BUSY:
            return messages.AnswerPush(event.worker, event.task, outcome, retry_after_s=self.plan.retry_after_s)
        why = self.judge.too_large_value(event) if outcome is Outcome.TOO_LARGE else ""
        return messages.AnswerPush(event.worker, event.task, outcome, self._decided(event, lease, outcome), why=why)

    def _decided(self, event: messages.UpdateArrived, lease: Lease, outcome: Outcome) -> Decision:
        decision = self.judge.decide(event, lease, outcome, self.t_decided + 1)
        self.dispatcher.close(lease, self.at)
        if decision.mix is not None:
            self._apply(decision, decision.mix)
        return decision

    def _apply(self, decision: Decision, mix: Answer) -> None:
        lease = decision.lease
        self.applied += 1
        self.gradients_mixed = min(self.gradients_mixed + decision.gradients, messages.TOTAL_MAX)
        self.group.took(lease.device)
        if self.scheduler.local_iterations_max:
            self.dispatcher.speeds.learn(lease, self.at, decision.gradients)
        self.contribution.count(lease.device, mix.keep, mix.new)
        self._commands.append(messages.MixUpdate(decision))
        if mix.publish:
            self._version_decided()

    def _version_decided(self) -> None:
        self.t_decided += 1
        self.gradients = self.gradients_mixed
        self.contribution.publish()
        self.group.over()
        self._commands += self.dispatcher.revoke_useless(self.at, self.t_decided)

    def _mixed(self, sequence: int) -> None:
        self._require(
            self.mixed < self.applied and sequence <= self.judge.decisions, f"decision {sequence} was there to mix"
        )
        self.mixed += 1

    def _published(self, t: int) -> None:
        self._require(self.t < t <= self.t_decided, f"version {t} was decided on and is new")
        before, self.t = self.t, t
        if t // self.plan.evaluate_every > before // self.plan.evaluate_every:
            self._evaluate()

    def _go_on_without(self, lost: messages.LossAccepted) -> None:
        self.book.tasks = max(self.book.tasks, lost.tasks)
        if lost.dropped:
            self.mixed += lost.dropped
            self.t_decided = self.t
            self.group.over()
        self.end_if_enough()

    # --- time --------------------------------------------------------------------------------------------------------

    def _trigger(self) -> None:
        self._commands += self.dispatcher.trigger(self.at, self.t, self.t_decided, self.queued)

    def _wake_next(self) -> None:
        """Ask to be woken at the next moment that matters, unless an earlier waking is on its way."""
        due = min(self.dispatcher.next_due(self.at), self.plan.until_s)
        if self.at < due < self.woken_at and not self.end_reason:
            self.woken_at = due
            self._commands.append(messages.WakeAt(due))

    def _passed(self) -> None:
        if self.at >= self.woken_at:
            self.woken_at = inf
        self._commands += self.dispatcher.release_expired(self.at)
        if self.at >= self.group.due and not self.end_reason:
            self._publish_group()

    def _publish_group(self) -> None:
        """The group's deadline has passed: go on with what has arrived, or give it more time if nothing has."""
        if not self.group.arrived:
            self.group.due = self.at + self.plan.retry_after_s
            return
        closing, self.judge.memory = self.rule.closed(self.t_decided + 1, self.judge.memory)
        self._version_decided()
        self.end_if_enough()
        self._commands.append(messages.PublishVersion(self.t_decided, closing))

    # --- evaluation and the end --------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        self.evaluated_t = self.t
        self._commands.append(messages.EvaluateModel(self.t))

    def _evaluated(self, event: messages.Evaluated) -> None:
        self.dispatcher.evaluated(event)
        if self.plan.keep_best and self.plan.keep_best.better(event, self.outcome.best):
            self.outcome.best = event
        if self.plan.target and self.plan.target.reached(event.metrics) and not self.end_reason:
            self.end_reason = f"target {self.plan.target} reached at epoch {event.t}"
            self.outcome.result_t = event.t

    def _extended(self, event: messages.RunExtended) -> list[Command]:
        """Go on with other ends as if they had always been there.

        The event before this one may have ended the run: tasks that were not granted for that are granted now.
        """
        had_ended, self.end_reason = bool(self.end_reason), ""
        self.finished, self.outcome.result_t, self.outcome.extended = False, None, True
        self.plan = Ends.said_by(event).put_into(self.plan)
        self.end_if_enough()
        return self._settled(trigger=had_ended and not self.awaits)

    def end_if_enough(self) -> None:
        if self.end_reason:
            return
        reason = self.plan.end(self.t_decided, self.gradients, self.at)
        if reason:
            self.outcome.failed = self.all_refused
            self.end_reason = (
                f"{reason}; all {self.judge.decisions} updates were refused" if self.all_refused else reason
            )
        elif self.judge.refused:
            self.end_reason = self.plan.failure(self.t, self.judge.not_finite, self.judge.refused)
            self.outcome.failed = bool(self.end_reason)

    def _finish_if_done(self) -> None:
        if not self.finished and not self.queued and self.t == self.t_decided:
            self.finished = True
            if self.t and self.evaluated_t != self.t:
                self._evaluate()
            self._commands.append(messages.Finish(self.end_reason))
