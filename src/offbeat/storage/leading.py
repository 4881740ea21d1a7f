"""Owns the way of a coordinator through a ledger: every decision is made anew from the rows that last, and compared.

Rules kept here:
- Only lasting rows are used, so a pruned ledger leads as far as a new one.
- Events are handled, leases and their ends are followed, answers are compared: all but the deadline of the lease, which
  heartbeats move and nothing is decided by.
- A ledger without a row for every mixing is one whose updates were mixed as soon as they were decided on (simulated),
  or of before there was a chain: what such a one lacks is said.
"""

import json
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from offbeat.errors import InvariantBroken
from offbeat.protocol.led import Dispatched, LedCoordinator
from offbeat.protocol.messages import (
    AnswerPush,
    Command,
    EndSilence,
    Event,
    MixUpdate,
    PublishVersion,
    Quarantine,
    ReleaseTask,
    SendTask,
    UpdateMixed,
    VersionPublished,
)
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.recorded_steps import closing_in
from offbeat.storage.rows import COMMANDS, Row, as_event, as_lease

COMPARED = (AnswerPush, Quarantine)
"""What must be answered as it was; what happens to leases is told."""
ANSWERS = ("decided", "busy", "unknown", "not_yours", "repeated", "quarantined")
MOVED_BY_HEARTBEATS = "deadline"
ANY_NUMBER = 2**62
UNKNOWN_TO_THE_UNCHAINED = (
    "when tasks were asked for",
    "when updates were mixed: each counts as mixed when its version was published, and one that met a full queue as "
    "refused for that",
    "when a group was closed by its deadline: it counts as closed when its version was published",
)


@dataclass(slots=True)
class LedThrough:
    """What came of leading a coordinator through a ledger."""

    decisions: int = 0
    """Decisions that were made anew."""
    leases: int = 0
    differences: list[str] = field(default_factory=list)
    """The first that was decided otherwise than recorded: what follows depends on it."""
    lacks: list[str] = field(default_factory=list)
    """What the ledger does not know, and what is assumed instead."""


def lead(ledger: Ledger, coordinator: LedCoordinator) -> LedThrough:
    """Lead a new coordinator of the run's method through its ledger, to the end or to the first difference."""
    return _Leader(ledger, coordinator).run()


class _Leader:
    def __init__(self, ledger: Ledger, coordinator: LedCoordinator) -> None:
        self._ledger, self._coordinator, self._led = ledger, coordinator, LedThrough()
        self._mixings = ledger.chained and ledger.mixings
        """Every mixing has its row."""
        self._unmixed: deque[MixUpdate] = deque()
        self._expected: deque[tuple[str, dict[str, Any]]] = deque()
        """Answers that must be the next ones in the ledger."""
        if not ledger.chained:
            coordinator.plan = replace(coordinator.plan, queue_max=ANY_NUMBER)
            self._led.lacks.extend(UNKNOWN_TO_THE_UNCHAINED if ledger.verbose else UNKNOWN_TO_THE_UNCHAINED[:1])

    def run(self) -> LedThrough:
        rows = (row for row in self._ledger.rows() if row.kind not in CHATTER)
        row = next(rows, None)
        while row is not None and not self._led.differences:
            if row.kind == "loss_accepted":
                self._led.lacks.append(f"what was decided from row {row.sequence} on depends on rows that are lost")
                return self._led
            following = next(rows, None)
            if self._is_missing_busy(row, following):
                following = next(rows, None)
            else:
                self._take(row)
            row = following
        if self._expected and not self._led.differences:
            self._differ("the end", f"{self._expected[0][0]} is missing")
        return self._led

    def _is_missing_busy(self, row: Row, following: Row | None) -> bool:
        """An arrival that met a full queue, in a ledger that does not know how full it was."""
        return not self._ledger.chained and row.kind == "arrived" and following is not None and following.kind == "busy"

    def _take(self, row: Row) -> None:
        event = as_event(row)
        try:
            if event is not None:
                self._handle(row, event)
            elif row.kind in ANSWERS:
                self._compare(row)
            else:
                self._follow(row)
        except InvariantBroken as error:
            self._differ(f"row {row.sequence}", str(error))

    def _handle(self, row: Row, event: Event) -> None:
        if self._expected:
            self._differ(f"row {row.sequence}", f"{self._expected[0][0]} is missing before it")
            return
        if isinstance(event, UpdateMixed) and not self._mixings:
            return
        if isinstance(event, VersionPublished):
            self._until(event)
        self._note(event, self._coordinator.handle(event))

    def _until(self, published: VersionPublished) -> None:
        """What is not told on the way to a publication: mixings, and the closing of a group in older ledgers."""
        c = self._coordinator
        if not self._ledger.chained and published.t > c.t_decided:
            self._note(published, c.follow(published.at, PublishVersion(published.t)))
        while not self._mixings and self._unmixed and self._unmixed[0].decision.t <= published.t:
            self._mix_next(published.at)

    def _note(self, event: Event, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, COMPARED):
                made = COMMANDS[type(command)](command, event.at)
                self._expected.append((made.kind, made.facts()))
            elif isinstance(command, MixUpdate) and not self._mixings:
                self._unmixed.append(command)
        if self._ledger.chained or not self._ledger.verbose:  # simulated: mixed at once
            while self._unmixed:
                self._mix_next(event.at)

    def _mix_next(self, at: float) -> None:
        c = self._coordinator
        c.handle(UpdateMixed(max(at, c.at), self._unmixed.popleft().decision.sequence))

    def _compare(self, row: Row) -> None:
        kind, facts = self._expected.popleft() if self._expected else ("nothing", {})
        self._led.decisions += row.kind == "decided"
        if kind != row.kind:
            self._differ(f"row {row.sequence}", f"{row.kind} was recorded; now it is {kind}")
            return
        self._compare_facts(row, facts)

    def _compare_facts(self, row: Row, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            recorded = getattr(row, name)
            if recorded != value and name != MOVED_BY_HEARTBEATS:
                self._differ(f"row {row.sequence} ({row.kind})", f"{name} was {recorded!r}; now it is {value!r}")
                return

    def _follow(self, row: Row) -> None:
        command = _dispatched(row)
        if command is None:
            return
        commands = self._coordinator.follow(row.at, command)
        for made in (one for one in commands if isinstance(one, SendTask)):
            self._led.leases += 1
            self._compare_facts(row, {**COMMANDS[SendTask](made, row.at).facts(), "asked_at": row.asked_at})

    def _differ(self, where: str, what: str) -> None:
        self._led.differences.append(f"{where}: {what}")


def _dispatched(row: Row) -> Dispatched | None:
    """What a row says that the coordinator did; None for rows of other kinds."""
    if row.kind == "group_closed":
        return PublishVersion(int(row.t or 0), closing_in(row.detail))
    if row.kind not in ("leased", "released", "heard_again"):
        return None
    facts = json.loads(row.detail) if row.detail else {}
    lease = as_lease(row)
    if row.kind == "leased":
        return SendTask(lease, row.asked_at)
    if row.kind == "released":
        return ReleaseTask(lease, facts["revoked"], facts.get("silent", False))
    return EndSilence(lease, facts["resumed"])
