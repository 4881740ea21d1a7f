"""Owns fault injection: messages lost, doubled, delayed, reordered; workers that die, leave, fall silent and come back
in time, late or never, or push NaN; a server that is too slow and tells workers to come back, is paused, or restarts.

Rules kept here:
- One seed draws the whole plan: settings, rates, every single fault. To replay it:
  `python -m tests.simulation.faults SEED`, or `... SEED CASE` for a rule of `rule_cases.py`.
- Safety first: after every event the invariants hold, every task is decided on at most once, no lease is lost, and
  what was applied is what an independent count says. Then liveness: the faults stop, and training must finish.
- A restarted server is a new coordinator led through the recorded events; it must stand where the old one stood.
- A kind of fault draws under a key of its own, so that adding one leaves the draws of the others as they were.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import get_args

import numpy as np

from offbeat.core import draws
from offbeat.core.kernel import Updater
from offbeat.core.layout import Array, Model
from offbeat.core.rules import Rule, average_from_spec, fedasync, fedavg, fedbuff
from offbeat.core.staleness import polynomial
from offbeat.errors import InvariantBroken
from offbeat.method import rule_of
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.dispatch import Available
from offbeat.protocol.idle import Choice
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    EndSilence,
    Event,
    HeartbeatArrived,
    Lease,
    MixUpdate,
    Outcome,
    ReleaseTask,
    RunPaused,
    RunResumed,
    SendTask,
    ServerRestarted,
    TaskRequested,
    WorkerLeft,
)
from offbeat.protocol.plan import Plan
from offbeat.protocol.scheduler import Scheduler
from offbeat.protocol.snapshot import restored, snapshot
from offbeat.settings import Settings
from offbeat.sim.devices import device_model
from offbeat.sim.engine import Engine
from offbeat.sim.event_sources import Arrival, Happening, SimulatedFleet
from offbeat.sim.executors import Inline
from offbeat.sim.plane import Plane
from offbeat.task import Trained, Work, start
from tests.simulation.invariants import check, story_of
from tests.simulation.rule_cases import RULE_CASES

FAULT, BROKEN, SILENT, PAUSED, RESTARTED = 0x6661_756C, 0x6272_6F6B, 0x7369_6C65, 0x7061_7573, 0x7265_7374
RULE = 0x7275_6C65
BROKEN_RATE = 0.03
DEVICES, EPOCHS = 12, 60
CALM_AT = 40.0
EVENTS_MAX = 20_000


class Pull:
    """A task that costs nothing: every device pulls the model towards its own number, and now and then pushes NaN."""

    def initial(self, seed: int) -> Mapping[str, Array]:
        return {"x": np.full(1, seed % 7, np.float32)}

    def train(self, model: Model, work: Work) -> Trained:
        broken = draws.uniform(work.seed, BROKEN, work.device, work.number) < BROKEN_RATE
        model["x"][:] = np.nan if broken else (model["x"] + np.float32(work.device)) / 2
        return Trained(samples=1 + work.device, gradients=3)

    def evaluate(self, model: Model) -> Mapping[str, float]:
        return {"x": float(model["x"][0])}


class Faulty(SimulatedFleet):
    """A fleet whose messages and workers fail until `CALM_AT`."""

    def __init__(self, seed: int, plan: Plan) -> None:
        super().__init__(DEVICES, device_model("lognormal:1", seed), seed=seed)
        self._number = self._silences = 0
        self.rate = 0.5 * self._draw()
        self.lease_s, self.silent_s = plan.lease_s, plan.silent_s

    def opening(self) -> Iterator[Happening]:
        """The run is paused and resumed now and then, also twice or at the same time."""
        yield from super().opening()
        for n in range(draws.below(4, self.seed, PAUSED, 0)):
            begin = 1.5 * CALM_AT * draws.uniform(self.seed, PAUSED, 1, n)
            yield RunPaused(begin)
            yield RunResumed(begin + 8 * draws.uniform(self.seed, PAUSED, 2, n))

    def started(self, lease: Lease, at: float) -> Iterator[Happening]:
        """The update may come late, twice, long after its lease ran out, or not at all; its worker may be silent."""
        happenings = list(self._started(lease, at))
        yield from happenings
        if self.silent_s < inf:
            until = min((one.at for one in happenings if isinstance(one, Arrival)), default=at)
            yield from self._heard(lease, at, until)

    def _heard(self, lease: Lease, at: float, done: float) -> Iterator[Happening]:
        """Heartbeats until the task is done, unless the worker is silent from some moment on."""
        if at >= CALM_AT or self._silence() >= self.rate:
            yield from self._beats(lease, at, done)
            return
        silent = at + (done - at) * self._silence()
        yield from self._beats(lease, at, silent)
        match int(self._silence() * 5):
            case 0:  # it is back while its lease may be opened again
                back = silent + self.silent_s * (1 + 2 * self._silence())
                yield from (HeartbeatArrived(back, lease.task, lease.worker), *self._beats(lease, back, done))
            case 1:  # it is back about when the lease is over
                back = silent + self.lease_s * (0.5 + self._silence())
                yield from (HeartbeatArrived(back, lease.task, lease.worker), *self._beats(lease, back, done))
            case 2:  # it asks, as if it had no task
                yield TaskRequested(silent + self.silent_s * (1 + 2 * self._silence()), lease.worker)
            case 3:  # one sign of life, and then none for a second time
                yield HeartbeatArrived(silent + self.silent_s * (1 + self._silence()), lease.task, lease.worker)
            case _:  # nothing is heard but its push, if there is one
                pass

    def _beats(self, lease: Lease, begin: float, until: float) -> Iterator[Happening]:
        for n in range(1, int((until - begin) / (self.silent_s / 3)) + 1):
            yield HeartbeatArrived(begin + n * self.silent_s / 3, lease.task, lease.worker)

    def _silence(self) -> float:
        self._silences += 1
        return draws.uniform(self.seed, SILENT, 1, self._silences)

    def _started(self, lease: Lease, at: float) -> Iterator[Happening]:
        for happening in super().started(lease, at):
            if not isinstance(happening, Arrival) or not self._fault(at):
                yield happening
                continue
            kind, done = int(self._draw() * 6), happening.at
            match kind:
                case 0:  # the push is lost, the worker tries again
                    yield Arrival(done + 5 * self._draw(), lease)
                case 1:  # the answer is lost, the worker pushes again, perhaps more than once
                    yield happening
                    yield Arrival(done + 3 * self._draw(), lease)
                    yield Arrival(done + 30 * self._draw(), lease)
                case 2:  # the worker crashes before the push, and asks again when it is back
                    yield TaskRequested(done + 20 * self._draw(), lease.worker)
                case 3:  # it returns with an old task after it was given up on
                    yield Arrival(done + 60 * self._draw(), lease)
                    yield TaskRequested(done + 10 * self._draw(), lease.worker)
                case 4:  # it says goodbye with its task, joins again, and pushes what it had after all
                    gone = at + (done - at) * self._draw()
                    yield WorkerLeft(gone, lease.worker)
                    yield TaskRequested(gone + 10 * self._draw(), lease.worker)
                    yield Arrival(done + 20 * self._draw(), lease)
                case _:  # it is gone for long
                    yield TaskRequested(max(done, CALM_AT) + 30 * self._draw(), lease.worker)

    def answered(self, answer: AnswerPush, at: float) -> Iterator[Happening]:
        """The worker may crash after the push, and ask for its next task much later."""
        for happening in super().answered(answer, at):
            if isinstance(happening, TaskRequested) and self._fault(at):
                yield TaskRequested(at + 15 * self._draw(), happening.worker)
            else:
                yield happening

    def _fault(self, at: float) -> bool:
        return at < CALM_AT and self._draw() < self.rate

    def _draw(self) -> float:
        self._number += 1
        return draws.uniform(self.seed, FAULT, self._number)


@dataclass
class Watch:
    """Looks at every event and every command, and raises when something is wrong."""

    coordinator: Coordinator
    events: list[Event] = field(default_factory=list)
    answers: list[bool] = field(default_factory=list)
    """The answers of `available`, in order: the coordinator's only other input."""
    applied: dict[int, int] = field(default_factory=dict)
    duplicates: int = 0
    restarts: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    decided: set[int] = field(default_factory=set)
    leases: dict[int, str] = field(default_factory=dict)
    """Where the lease of every task is that was not decided on: open, silent or released; in the order of release."""
    silences: Counter[str] = field(default_factory=Counter)
    """How they ended: resumed, given away, pushed."""

    def record(self, event: Event, commands: list[Command]) -> None:
        """Check one event and its commands."""
        self.events.append(event)
        check(self.coordinator)
        for command in commands:
            if isinstance(command, MixUpdate):
                self._mixed(command)
            if isinstance(command, AnswerPush):
                self.duplicates += command.repeated
                self.outcomes[command.outcome] += 1
            self._follow(command)
        self._no_lease_is_lost()

    def _follow(self, command: Command) -> None:
        """Keep an account of the leases by what is commanded alone."""
        match command:
            case SendTask(lease):
                self.leases[lease.task] = "open"
            case ReleaseTask(lease, _, silent):
                del self.leases[lease.task]
                self.leases[lease.task] = "silent" if silent else "released"
            case EndSilence(lease, resumed):
                self.silences["resumed" if resumed else "given away"] += 1
                del self.leases[lease.task]
                self.leases[lease.task] = "open" if resumed else "released"
            case AnswerPush(task=task, decision=decision, repeated=False) if decision is not None:
                if task in self.decided:
                    raise InvariantBroken(f"task {task} was decided on twice: {decision}")
                self.decided.add(task)
                self.silences["pushed"] += self.leases.pop(task) == "silent"

    def _no_lease_is_lost(self) -> None:
        c = self.coordinator
        released = [task for task, where in self.leases.items() if where == "released"]
        for task in released[: max(0, len(released) - c.plan.released_kept)]:
            del self.leases[task]
        found = (
            dict.fromkeys(c.leases, "open") | dict.fromkeys(c.silent, "silent") | dict.fromkeys(c.released, "released")
        )
        if found != self.leases:
            raise InvariantBroken(f"leases are {found}, but were made {self.leases}\n" + "\n".join(c.latest(3)))

    def _mixed(self, command: MixUpdate) -> None:
        decision = command.decision
        if decision.lease.task in self.applied:
            story = "\n".join(story_of(self.coordinator, decision.lease.task))
            raise InvariantBroken(f"task {decision.lease.task} was applied twice:\n{story}")
        self.applied[decision.lease.task] = decision.t
        if decision.staleness != decision.t - 1 - decision.lease.tau or decision.outcome is not Outcome.APPLIED:
            raise InvariantBroken(f"the decision does not fit its lease: {decision}")
        if decision.staleness > self.coordinator.plan.bound():
            raise InvariantBroken(f"staleness above its bound was accepted: {decision}")


def configuration(seed: int) -> tuple[Rule, Plan, Scheduler]:
    """Settings drawn by the seed."""
    policies = ("weigh", "reject", "pace")
    policy = policies[draws.below(3, seed, FAULT, 0, 1)]
    lease_s = 2.0 + 10 * draws.uniform(seed, FAULT, 0, 3)
    part = 0.1 + draws.uniform(seed, SILENT, 0, 1)
    plan = Plan(
        in_flight_max=1 + draws.below(8, seed, FAULT, 0, 2),
        lease_s=lease_s,
        silent_s=part * lease_s if draws.below(3, seed, SILENT, 0, 2) else inf,
        queue_max=1 + draws.below(4, seed, FAULT, 0, 4),
        staleness_policy=policy,  # type: ignore[arg-type]
        staleness_max=None if policy == "weigh" else 1 + draws.below(8, seed, FAULT, 0, 5),
        pace_wait_s=5.0,
        epochs=EPOCHS,
        evaluate_every=10,
        answers_kept=50,
        released_kept=50,
    )
    match draws.below(4, seed, FAULT, 0, 6):
        case 0:
            return fedbuff(3), plan, Scheduler(choice="fair")
        case 1:
            k = 1 + draws.below(5, seed, FAULT, 0, 7)
            deadline = 10.0 if draws.below(2, seed, FAULT, 0, 8) else None
            return fedavg(k), plan, Scheduler(group=k, over_selection=1.3, group_deadline_s=deadline)
        case 2:
            return fedasync(0.6, polynomial(0.5)), plan, Scheduler(trigger_every_s=0.5)
    return fedasync(0.6, polynomial(0.5)), plan, Scheduler()


def of_case(seed: int, case: str) -> tuple[Rule, Plan, Scheduler]:
    """The drawn settings, with a rule of `rule_cases.py` and any order of devices in place of theirs."""
    settings, (_, plan, _) = Settings.of(RULE_CASES[case]), configuration(seed)
    rule = rule_of(settings)
    if rule.staleness_max is not None:
        limits = {"staleness_policy": "reject", "staleness_max": rule.staleness_max, "cancels": rule.cancels}
        plan = replace(plan, **limits, starts_in_time=True)  # type: ignore[arg-type]
    choices = get_args(Choice) if settings.scheduler == Settings().scheduler else (settings.scheduler,)
    choice = choices[draws.below(len(choices), seed, RULE, 0, 1)]
    if choice == "fair" and plan.staleness_policy == "pace":
        # Those whose leases run out before they push never contribute, and would be asked first for ever.
        choice = "random"
    deadline = 5.0 if settings.group_deadline_s is not None else None
    return rule, plan, Scheduler(choice, group=rule.group, group_deadline_s=deadline)


def run(seed: int, case: str = "") -> Watch:
    """One faulty run, of a rule that is drawn or that of a case; raises if it breaks a rule or does not finish."""
    rule, plan, scheduler = of_case(seed, case) if case else configuration(seed)
    source, task = Faulty(seed, plan), Pull()
    answers: list[bool] = []

    def available(worker: int, at: float) -> bool:
        answers.append(source.available(worker, at))
        return answers[-1]

    watch = Watch(Coordinator(rule, plan, scheduler, seed=seed, available=available), answers=answers)
    executor = Inline(task)
    with Updater(compiled=False) as updater:
        average = average_from_spec(RULE_CASES[case].get("average", "none")) if case else None
        plane = Plane(start(task, seed), rule, executor, updater, seed=seed, average=average)
        slow = draws.below(2, seed, FAULT, 0, 10)
        engine = Engine(watch.coordinator, source, plane, watch.record, mix_s=0.4 * slow)
        restart_after = 50 + draws.below(400, seed, FAULT, 0, 9)
        while not engine.finished:
            executor.finish(engine.advance(handled_max=engine.handled + 1))
            if engine.handled > EVENTS_MAX:
                raise InvariantBroken(f"not finished after {EVENTS_MAX} events, at epoch {watch.coordinator.t}")
            if engine.handled > restart_after:
                restart_after += 400
                watch.restarts += 1
                again = _from_checkpoint if case and draws.below(2, seed, RULE, engine.handled) else _restarted
                engine.coordinator = watch.coordinator = again(watch, seed, available)
                if draws.below(2, seed, RESTARTED, engine.handled):
                    _connect_again(engine)
    if watch.coordinator.t < EPOCHS:
        raise InvariantBroken(f"no event was left at epoch {watch.coordinator.t} of {EPOCHS}")
    return watch


def _restarted(watch: Watch, seed: int, available: Available) -> Coordinator:
    """A new coordinator that has handled all recorded events."""
    old, said = watch.coordinator, iter(list(watch.answers))
    new = Coordinator(old.rule, old.plan, old.scheduler, seed=seed, available=lambda _worker, _at: next(said))
    for event in watch.events:
        new.handle(event)
    new.dispatcher.available = available
    return _alike(new, old)


def _from_checkpoint(watch: Watch, seed: int, available: Available) -> Coordinator:
    """A new coordinator from what a checkpoint keeps."""
    old = watch.coordinator
    state = json.loads(json.dumps(snapshot(old), allow_nan=False))
    return _alike(restored(state, old.rule, old.plan, old.scheduler, seed=seed, available=available), old)


def _alike(new: Coordinator, old: Coordinator) -> Coordinator:
    found, wanted = snapshot(new), snapshot(old)
    for name in wanted:
        if found[name] != wanted[name]:
            raise InvariantBroken(f"after a restart {name} is {found[name]!r} but was {wanted[name]!r}")
    return new


def _connect_again(engine: Engine) -> None:
    """The server says that it was restarted, and the workers that waited ask again."""
    c = engine.coordinator
    waiting = [worker for worker in range(DEVICES) if worker in c.idle]
    engine.feed(ServerRestarted(c.at))
    for worker in waiting:
        engine.feed(TaskRequested(c.at, worker))


def main(arguments: list[str]) -> None:
    """Replay one seed, and print what happened."""
    watch = run(int(arguments[0]), " ".join(arguments[1:]))
    c = watch.coordinator
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(watch.outcomes.items()))
    silences = ", ".join(f"{count} {end}" for end, count in sorted(watch.silences.items()))
    sys.stdout.write(
        f"seed {arguments[0]}: {c.t} epochs, {len(watch.events)} events, {watch.duplicates} repeated; {outcomes}"
        f"; silent leases: {silences or 'none'}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
