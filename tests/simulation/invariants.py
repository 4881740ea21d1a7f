"""Owns what must hold of a coordinator after every event; tests and fault-injected runs ask each time."""

import re
from collections.abc import Iterator
from math import inf

from offbeat.errors import InvariantBroken
from offbeat.protocol.coordinator import STORY_LENGTH, Coordinator


def check(coordinator: Coordinator) -> None:
    """Raise, with the latest events, unless the state makes sense."""
    broken = [name for name, holds in _invariants(coordinator) if not holds]
    if broken:
        raise InvariantBroken(f"not so any more: {'; '.join(broken)}\n" + "\n".join(coordinator.latest(10)))


def story_of(coordinator: Coordinator, task: int) -> list[str]:
    """The latest events and commands that name this task."""
    return [line for line in coordinator.latest(STORY_LENGTH) if re.search(rf"\btask={task}\b", line)]


def _invariants(c: Coordinator) -> Iterator[tuple[str, bool]]:
    plan, scheduler = c.plan, c.scheduler
    workers = [lease.worker for lease in c.leases.values()]
    devices = [lease.device for lease in c.leases.values()]
    asleep = [lease.worker for lease in c.silent.values()]
    most = max((devices.count(device) for device in set(devices)), default=0)
    yield "t counts published versions", 0 <= c.t <= c.t_decided
    yield (
        "a version that is decided on and not published waits in the queue",
        c.t == c.t_decided or c.queued > 0 or (bool(scheduler.group)),
    )
    yield "a finished or failed run has a reason", bool(c.end_reason) or not (c.finished or c.outcome.failed)
    yield "what reached the target is a published version", c.outcome.result_t is None or c.outcome.result_t <= c.t
    yield "the queue is bounded", 0 <= c.queued <= plan.queue_max
    yield "every applied update was decided on", c.mixed <= c.applied <= c.judge.decisions
    yield "a worker has one open lease", len(set(workers)) == len(workers)
    yield "in_flight_max holds", len(c.leases) <= max(plan.in_flight_max, scheduler.quota)
    yield "tasks_per_device holds", plan.tasks_per_device is None or most <= plan.tasks_per_device
    yield "an answered task has no open lease", not c.leases.keys() & c.judge.answers.keys()
    yield "a released lease is not open", not c.leases.keys() & c.released.keys()
    yield "open leases are in the order of their grant", list(c.leases) == sorted(c.leases)
    yield "a silent lease is neither open nor released", not c.silent.keys() & (c.leases.keys() | c.released.keys())
    yield "an answered task is not silent", not c.silent.keys() & c.judge.answers.keys()
    yield "a worker has one lease, open or silent", len({*workers, *asleep}) == len(workers) + len(asleep)
    yield (
        "who is silent does not wait, and is not quarantined",
        not any(w in c.idle or w in c.quarantined for w in asleep),
    )
    yield "only where it is set a worker is silent", not asleep or plan.silent_s < inf
    yield (
        "every lease is found under its worker",
        all(map(c.book.of_worker, workers)) and all(map(c.book.silent_of, asleep)),
    )
    yield "an answered task is not waiting for a late push", not c.released.keys() & c.judge.answers.keys()
    yield "who has a lease does not wait", not any(worker in c.idle for worker in workers)
    yield (
        "who is quarantined has no open lease and does not wait",
        not any(worker in workers or worker in c.idle for worker in c.quarantined),
    )
    yield "tau is a published version", all(0 <= lease.tau <= c.t for lease in c.leases.values())
    yield "what is kept is bounded", len(c.judge.answers) <= plan.answers_kept and len(c.released) <= plan.released_kept
