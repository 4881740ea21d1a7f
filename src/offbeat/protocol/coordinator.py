"""Owns every decision of the server: one state machine, `handle(event) -> [command]`.

Rules kept here:
- It decides and never acts: no clock (the time is in the event), no input or output, no arrays.
- Decisions are made once, in one serial order, with their coefficients; whoever redoes them recomputes nothing.
- A lease's tau is the newest published version; staleness is counted from it to the mixing, so queued updates count.
- A task is answered once. A push that comes again gets the first answer again and changes nothing.
- A released lease frees its device, but a late push under it is still judged.
- A worker whose updates are bad again and again is quarantined: it is given nothing, and what it pushes is refused.
- It never waits for anybody: no start barrier, no fixed number of workers; they join and leave at any time.
"""

from collections import OrderedDict, deque
from collections.abc import Callable
from math import inf, isinf
from typing import Any, assert_never

from offbeat.core.gate import Accepted, clipped
from offbeat.core.rules import Facts, Mix, Rule
from offbeat.errors import InvariantBroken
from offbeat.protocol.conduct import Conduct
from offbeat.protocol.contribution import Contribution
from offbeat.protocol.groups import Group
from offbeat.protocol.leases import LeaseBook
from offbeat.protocol.messages import (
    AnswerPush,
    BadUpdateArrived,
    Command,
    Decision,
    Evaluated,
    EvaluateModel,
    Event,
    Finish,
    FleetJoined,
    HeartbeatArrived,
    Lease,
    LeaseReturned,
    MixUpdate,
    Outcome,
    PublishVersion,
    Quarantine,
    ReleaseTask,
    RequestEnded,
    SendTask,
    ServerRestarted,
    TaskRequested,
    TellFinished,
    TellQuarantined,
    TimePassed,
    UpdateArrived,
    UpdateMixed,
    VersionPublished,
    WakeAt,
    WorkerBarred,
    WorkerJoined,
    WorkerLeft,
    WorkerReadmitted,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Idle, Scheduler
from offbeat.protocol.speeds import Speeds

STORY_LENGTH = 256
MOMENTS = ("_woken_at", "_trigger_due", "_retry_due")


class Coordinator:
    """Leases, queue, admission, staleness policy and end of one run."""

    def __init__(
        self,
        rule: Rule,
        plan: Plan,
        scheduler: Scheduler | None = None,
        *,
        seed: int = 0,
        available: Callable[[int, float], bool] = lambda _worker, _at: True,
    ) -> None:
        """`available` says whether a waiting worker can take a task now; it must be a pure function."""
        self.rule, self.plan, self.scheduler = rule, plan, scheduler or Scheduler()
        self.available = available
        self.at = 0.0
        self.t = 0
        """Versions published."""
        self.t_decided = 0
        """Versions decided on, those included that are not published yet."""
        self.sequence = 0
        """Decisions made."""
        self.applied = 0
        self.mixed = 0
        self.gradients = 0
        """Gradients in the versions decided on; those of a group count when its version does."""
        self.duplicates = 0
        self.not_finite = 0
        """Updates in a row that were refused for NaN or infinity."""
        self.memory = rule.memory
        self.accepted: Accepted = ()
        """What the gate remembers."""
        self.conduct = Conduct(plan.bad_updates_max)
        self.book = LeaseBook(plan.released_kept)
        self.answers: OrderedDict[int, AnswerPush] = OrderedDict()
        self.idle = Idle(self.scheduler.choice, seed)
        self.contribution = Contribution()
        self.evaluations: list[Evaluated] = []
        self.ending = ""
        """Why the run ends, once it does; `finished` when all that was decided is mixed."""
        self.finished = False
        self._evaluating = 0
        self._device_of: dict[int, int] = {}
        self._fleet: int | None = None
        self._numbers: dict[int, int] = {}
        self._speeds = Speeds()
        self._group = Group(self.scheduler.group_deadline_s)
        self._gradients_mixed = 0
        self._tasks = 0
        self._woken_at = inf
        self._trigger_due = -inf
        self._retry_due = inf
        self._held: tuple[int, float] | None = None
        self._story: deque[tuple[Event, list[Command]]] = deque(maxlen=STORY_LENGTH)
        self._commands: list[Command] = []

    # --- the one way in ----------------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Command]:  # noqa: C901 (one line per kind of event)
        """Take note of what happened; answer what to do."""
        if event.at < self.at:
            raise InvariantBroken(f"the clock went back from {self.at} to {event.at}: {event}")
        self.at = event.at
        commands: list[Command] = []
        self._commands = commands
        self._story.append((event, commands))
        if event.at >= self.plan.until_s:  # all else that can end a run was looked at when it changed
            self._end_if_enough()
        match event:
            case UpdateArrived():
                self._arrived(event)
            case TaskRequested():
                self._requested(event.worker)
            case UpdateMixed():
                self._mixed(event.sequence)
            case VersionPublished():
                self._published(event.t)
            case TimePassed():
                self._passed()
            case FleetJoined():
                self._fleet_joined(event)
            case WorkerJoined():
                self._device_of[event.worker] = event.device
            case WorkerLeft():
                self._left(event.worker)
            case LeaseReturned():
                self._returned(event)
            case RequestEnded():
                self.idle.discard(event.worker)
            case ServerRestarted():
                self._restarted()
            case BadUpdateArrived():
                self._bad_arrived(event)
            case WorkerBarred():
                if self.conduct.bar(event.worker, event.why):
                    self._quarantine(event.worker, event.why)
            case WorkerReadmitted():
                self.conduct.readmit(event.worker)
            case HeartbeatArrived():
                self.book.extend(event.task, self.at + self.plan.lease_s)
            case Evaluated():
                self._evaluated(event)
            case _:
                assert_never(event)
        self._end_if_enough()
        if not commands or not any(map(self._is_awaited, commands)):
            self._trigger()
        if self.ending:
            self._finish_if_done()
        self._wake_next()
        return commands

    # --- what others may ask -----------------------------------------------------------------------------------------

    @property
    def leases(self) -> dict[int, Lease]:
        """The open leases, by task."""
        return self.book.open

    @property
    def released(self) -> OrderedDict[int, tuple[Lease, bool]]:
        """The latest released leases, and whether they were revoked."""
        return self.book.released

    @property
    def queued(self) -> int:
        """Updates decided on and not yet mixed."""
        return self.applied - self.mixed

    @property
    def quarantined(self) -> dict[int, str]:
        """Workers that are given nothing, and what was wrong with their latest update."""
        return self.conduct.quarantined

    @property
    def needs_distance(self) -> bool:
        """Every update must be measured against its x_tau."""
        return self.rule.needs_distance or self.plan.gate is not None

    @property
    def needs_base(self) -> bool:
        """Updates are mixed with their x_tau, so leased versions must be kept."""
        return self.rule.needs_base or (self.plan.gate is not None and self.plan.gate.needs_base)

    @property
    def needs_evaluation(self) -> bool:
        """Decisions depend on evaluations, so a driver must not run ahead of them."""
        gamma = self.scheduler.gamma
        return self.plan.target is not None or (gamma is not None and getattr(gamma, "uses_evaluations", True))

    @property
    def wakes_at(self) -> float:
        """The moment of the last `WakeAt` that has not come yet; infinity where there is none."""
        return self._woken_at

    def device(self, worker: int) -> int:
        """The device that a worker trains for."""
        return self._device_of.get(worker, worker % self._fleet if self._fleet else worker)

    def latest(self, count: int) -> list[str]:
        """The latest events and what was answered, a line each."""
        return [f"{event} -> {commands}" for event, commands in list(self._story)[-count:]]

    def story(self, task: int) -> list[str]:
        """What happened to a task lately, a line each: it goes into every error about it."""
        return [
            f"{event} -> {commands}"
            for event, commands in self._story
            if getattr(event, "task", None) == task or any(_task(command) == task for command in commands)
        ]

    def _is_awaited(self, command: Command) -> bool:
        """Is it better to grant after this is done? A mixing: the next lease then starts from its result."""
        return isinstance(command, MixUpdate) or (isinstance(command, EvaluateModel) and self.needs_evaluation)

    def _require(self, holds: bool, what: str) -> None:
        if not holds:
            raise InvariantBroken(f"broken after {self._story[-1]}: {what}")

    # --- what only a snapshot needs ----------------------------------------------------------------------------------

    def rest(self) -> dict[str, Any]:
        """What nobody else may ask, as plain numbers; infinite moments are None."""
        moments = {name: getattr(self, name) for name in MOMENTS}
        return {
            "moments": {name: None if isinf(at) else at for name, at in moments.items()},
            "never_triggered": self._trigger_due == -inf,
            "evaluating": self._evaluating,
            "device_of": list(self._device_of.items()),
            "fleet": self._fleet,
            "numbers": list(self._numbers.items()),
            "speeds": self._speeds.state(),
            "group": self._group.state(),
            "gradients_mixed": self._gradients_mixed,
            "tasks": self._tasks,
            "held": self._held,
        }

    def restore_rest(self, state: dict[str, Any]) -> None:
        """Take what `rest` gave."""
        for name, at in state["moments"].items():
            setattr(self, name, inf if at is None else at)
        if state["never_triggered"]:
            self._trigger_due = -inf
        self._evaluating, self._fleet = state["evaluating"], state["fleet"]
        self._device_of, self._numbers = dict(state["device_of"]), dict(state["numbers"])
        self._speeds.restore(state["speeds"])
        self._group.restore(state["group"])
        self._gradients_mixed, self._tasks = state["gradients_mixed"], state["tasks"]
        self._held = None if state["held"] is None else (state["held"][0], state["held"][1])
        self._end_if_enough()  # the plan may ask for less than when the state was taken

    # --- workers -----------------------------------------------------------------------------------------------------

    def _fleet_joined(self, event: FleetJoined) -> None:
        self._fleet = event.devices
        for worker in range(event.size):
            if worker not in self.quarantined:
                self.idle.add(worker, self._mass(worker))

    def _mass(self, worker: int) -> float:
        return self.contribution.mass.get(self.device(worker), 0.0)

    def _requested(self, worker: int) -> None:
        lease = self.book.of_worker(worker)
        if self.ending:
            self._commands.append(TellFinished(worker))
        elif worker in self.quarantined:
            self._commands.append(TellQuarantined(worker, self.quarantined[worker]))
        elif lease:
            self._commands.append(SendTask(lease))
        else:
            self.idle.add(worker, self._mass(worker))

    def _left(self, worker: int) -> None:
        self.idle.discard(worker)
        lease = self.book.of_worker(worker)
        if lease:
            self._release(lease)
        self._device_of.pop(worker, None)

    def _returned(self, event: LeaseReturned) -> None:
        lease = self.leases.get(event.task)
        if lease and lease.worker == event.worker:
            self._release(lease)

    def _restarted(self) -> None:
        self.idle.clear()
        for task in self.leases:
            self.book.extend(task, self.at + self.plan.lease_s)

    def _bad_arrived(self, event: BadUpdateArrived) -> None:
        """It counts where a push would be judged, open lease or released; nobody can make it count for another."""
        lease, _ = self.book.find(event.task)
        if lease and lease.worker == event.worker and not self.ending:
            self._misbehaved(event.worker, event.why)

    def _misbehaved(self, worker: int, why: str) -> None:
        if self.conduct.bad(worker, why):
            self._quarantine(worker, why)

    def _quarantine(self, worker: int, why: str) -> None:
        self.idle.discard(worker)
        self._commands.append(Quarantine(worker, why))
        lease = self.book.of_worker(worker)
        if lease:
            self._release(lease, revoked=True)

    # --- updates -----------------------------------------------------------------------------------------------------

    def _arrived(self, event: UpdateArrived) -> None:
        answer = self._judge(event)
        self._commands.append(answer)
        if answer.decision and not answer.repeated:
            self.answers[event.task] = answer.again()
            if len(self.answers) > self.plan.answers_kept:
                self.answers.popitem(last=False)
            self._note_conduct(event, answer.outcome)

    def _judge(self, event: UpdateArrived) -> AnswerPush:
        first = self.answers.get(event.task)
        if first:
            if first.worker != event.worker:
                return AnswerPush(event.worker, event.task, Outcome.NOT_YOURS)
            self.duplicates += 1
            return first
        lease, revoked = self.book.find(event.task)
        if lease is None:
            return AnswerPush(event.worker, event.task, Outcome.UNKNOWN_TASK)
        if lease.worker != event.worker:
            return AnswerPush(event.worker, event.task, Outcome.NOT_YOURS)
        outcome = self._outcome(event, lease, revoked=revoked)
        if outcome is Outcome.BUSY:
            return AnswerPush(event.worker, event.task, outcome, retry_after_s=self.plan.retry_after_s)
        return AnswerPush(event.worker, event.task, outcome, self._decide(event, lease, outcome))

    def _outcome(self, event: UpdateArrived, lease: Lease, *, revoked: bool) -> Outcome:
        if self.ending:
            return Outcome.FINISHED
        if event.worker in self.quarantined:
            return Outcome.QUARANTINED
        if not event.finite:
            return Outcome.NOT_FINITE
        stale = event.base_gone or self.t_decided - lease.tau > self._bound()
        if revoked or stale or self._would_break_a_promise(lease):
            return Outcome.TOO_STALE
        if not self._gated(event)[0]:
            return Outcome.TOO_LARGE
        return Outcome.BUSY if self.queued >= self.plan.queue_max else Outcome.APPLIED

    def _would_break_a_promise(self, late: Lease) -> bool:
        """Under `pace`, a late push must not take the place that an open lease was promised."""
        oldest = self.book.oldest()
        if self.plan.staleness_policy != "pace" or oldest is None or late.task in self.leases:
            return False
        return (self.t_decided + 1 - oldest.tau) + (len(self.leases) - 1) > self._bound()

    def _bound(self) -> float:
        return 0 if self.scheduler.group else self.plan.bound()

    def _decide(self, event: UpdateArrived, lease: Lease, outcome: Outcome) -> Decision:
        t, staleness = self.t_decided + 1, self.t_decided - lease.tau
        mix = self._weighed(event, lease, t) if outcome is Outcome.APPLIED else None
        self.sequence += 1
        if outcome is not Outcome.QUARANTINED:  # whose numbers nobody looked at
            self.not_finite = self.not_finite + 1 if outcome is Outcome.NOT_FINITE else 0
        gradients = event.gradients
        decision = Decision(self.sequence, self.at, lease, outcome, t, staleness, mix, event.samples, gradients)
        self._forget_held(lease)
        self.book.close(lease)
        if mix is not None:
            self._apply(decision, mix)
        return decision

    def _weighed(self, event: UpdateArrived, lease: Lease, t: int) -> Mix:
        """The coefficients of an update; the rule sees it as the gate lets it through."""
        factor, accepted = self._gated(event)
        distance = None if event.distance is None else event.distance * factor
        facts = Facts(t, lease.tau, lease.device, event.samples, distance)
        mix, self.memory = self.rule.decide(facts, self.memory)
        self.accepted = accepted
        return clipped(mix, factor)

    def _gated(self, event: UpdateArrived) -> tuple[float, Accepted]:
        """What the gate makes of this update, and what it remembers once the update is applied."""
        if self.plan.gate is None:
            return 1.0, self.accepted
        if event.distance is None:
            raise InvariantBroken(f"the gate needs ||x_new - x_tau||, which was not measured: {event}")
        return self.plan.gate.judge(event.distance, self.accepted)

    def _note_conduct(self, event: UpdateArrived, outcome: Outcome) -> None:
        if outcome is Outcome.APPLIED:
            self.conduct.good(event.worker)
        elif outcome is Outcome.NOT_FINITE:
            self._misbehaved(event.worker, "its update holds NaN or infinity")
        elif outcome is Outcome.TOO_LARGE and self.plan.gate:
            limit = self.plan.gate.limit(self.accepted)
            self._misbehaved(event.worker, f"its ||x_new - x_tau|| is {event.distance:g}; {limit:g} is accepted")

    def _apply(self, decision: Decision, mix: Mix) -> None:
        lease = decision.lease
        self.applied += 1
        self._gradients_mixed += decision.gradients
        self._group.took(lease.device)
        if self.scheduler.local_iterations_max:
            self._speeds.learn(lease, self.at, decision.gradients)
        self.contribution.count(lease.device, mix.keep, mix.new, publish=False)
        self._commands.append(MixUpdate(decision))
        if mix.publish:
            self._version_decided()

    def _version_decided(self) -> None:
        self.t_decided += 1
        self.gradients = self._gradients_mixed
        self.contribution.publish()
        self._group.over()
        if self.scheduler.group:
            for lease in list(self.leases.values()):
                self._release(lease, revoked=True)

    def _mixed(self, sequence: int) -> None:
        self._require(self.mixed < self.applied and sequence <= self.sequence, f"decision {sequence} was there to mix")
        self.mixed += 1

    def _published(self, t: int) -> None:
        self._require(self.t < t <= self.t_decided, f"version {t} was decided on and is new")
        before, self.t = self.t, t
        if t // self.plan.evaluate_every > before // self.plan.evaluate_every:
            self._evaluate()

    # --- leases ------------------------------------------------------------------------------------------------------

    def _grant(self, worker: int) -> None:
        device = self.device(worker)
        if self.scheduler.group:
            self._group.granted(self.at)
        self._tasks += 1
        number = self._numbers.get(device, 0)
        self._numbers[device] = number + 1
        gamma = self.scheduler.gamma(self.t, self.evaluations) if self.scheduler.gamma else None
        iterations = self.scheduler.local_iterations(self._speeds.of(device), self._speeds.fastest)
        deadline = self.at + self.plan.lease_s
        lease = Lease(self._tasks, worker, device, number, self.t, self.at, deadline, iterations, gamma)
        self.book.grant(lease)
        self._commands.append(SendTask(lease))

    def _release(self, lease: Lease, *, revoked: bool = False) -> None:
        self._forget_held(lease)
        self.book.release(lease, revoked=revoked)
        self._commands.append(ReleaseTask(lease, revoked))

    def _forget_held(self, lease: Lease) -> None:
        if self._held and self._held[0] == lease.task:
            self._held = None

    # --- time --------------------------------------------------------------------------------------------------------

    def _wake_next(self) -> None:
        """Ask to be woken at the next moment that matters, unless an earlier waking is on its way."""
        patience = inf
        if self._held and len(self.idle):
            patience = max(self._held[1] + self.plan.pace_wait_s, self._trigger_due)
        trigger = self._trigger_due if self._trigger_due > self.at and len(self.idle) else inf
        due = min(self.book.next_deadline(), patience, trigger, self.plan.until_s, self._retry_due, self._group.due)
        if self.at < due < self._woken_at and not self.ending:
            self._woken_at = due
            self._commands.append(WakeAt(due))

    def _passed(self) -> None:
        if self.at >= self._woken_at:
            self._woken_at = inf
        if self.at >= self._retry_due:
            self._retry_due = inf
        for lease in self.book.expired(self.at):
            self._release(lease)
        if self.at >= self._group.due and not self.ending:
            self._publish_group()

    def _publish_group(self) -> None:
        """The group's deadline has passed: go on with what has arrived, or give it more time if nothing has."""
        if not self._group.arrived:
            self._group.due = self.at + self.plan.retry_after_s
            return
        self.memory = self.rule.memory
        self._version_decided()
        self._commands.append(PublishVersion(self.t_decided))

    # --- triggering --------------------------------------------------------------------------------------------------

    def _trigger(self) -> None:
        if self.ending or self.at < self._trigger_due or not len(self.idle):
            return
        held = False
        while len(self.idle) and self._room():
            held = not self._paced()
            worker = None if held else self.idle.pick(self._can_take, self._mass)
            if worker is None:
                break
            self._grant(worker)
        if len(self.idle) and not held:
            self._held = None  # whoever waits is not held back; an empty moment between two polls does not count
            if self._room():
                self._retry_due = min(self._retry_due, self.at + self.plan.retry_after_s)
        if self.scheduler.trigger_every_s:
            self._trigger_due = self.at + self.scheduler.trigger_every_s

    def _room(self) -> bool:
        """May one more task be in flight?"""
        if not self.scheduler.group:
            return len(self.leases) < self.plan.in_flight_max
        return self.t == self.t_decided and len(self.leases) + self._group.arrived < self.scheduler.quota

    def _paced(self) -> bool:
        """Under `pace`: would every lease stay within the bound, whatever the order of arrival?"""
        if self.plan.staleness_policy != "pace" or self.plan.staleness_max is None:
            return True
        oldest = self.book.oldest()
        if oldest is None:
            return self.queued <= self.plan.staleness_max
        ahead = (self.t - oldest.tau) + (len(self.leases) - 1) + self.queued + 1
        if ahead <= self.plan.staleness_max:
            self._held = None
            return True
        if self._held is None or self._held[0] != oldest.task:
            self._held = (oldest.task, self.at)
        if self.at >= self._held[1] + self.plan.pace_wait_s:
            self._held = None
            self._release(oldest, revoked=True)
            return self._paced()
        return False

    def _can_take(self, worker: int) -> bool:
        device = self.device(worker)
        limit = 1 if self.scheduler.group else self.plan.tasks_per_device
        if limit is not None and self.book.open_on(device) >= limit:
            return False
        if self.scheduler.group and device in self._group.devices:
            return False
        return self.available(worker, self.at)

    # --- evaluation and the end --------------------------------------------------------------------------------------

    def _evaluate(self) -> None:
        if self._evaluating != self.t or not self.t:
            self._evaluating = self.t
            self._commands.append(EvaluateModel(self.t))

    def _evaluated(self, event: Evaluated) -> None:
        self.evaluations.append(event)
        if self.plan.target and self.plan.target.reached(event.metrics) and not self.ending:
            self.ending = f"target {self.plan.target} reached at epoch {event.t}"

    def _end_if_enough(self) -> None:
        if not self.ending:
            self.ending = self.plan.end(self.t_decided, self.gradients, self.at, self.not_finite)

    def _finish_if_done(self) -> None:
        if not self.finished and not self.queued and self.t == self.t_decided:
            self.finished = True
            if self.t and self._evaluating != self.t:
                self._evaluate()
            self._commands.append(Finish(self.ending))


def _task(command: Command) -> int | None:
    match command:
        case SendTask() | ReleaseTask():
            return command.lease.task
        case MixUpdate():
            return command.decision.lease.task
        case AnswerPush():
            return command.task
    return None
