"""Owns what an administrator should look at now: every trouble, from when it is noticed until it has passed.

Rules kept here:
- There is one sentence for each subject: what is wrong, and what to do. It is logged when it begins and when it is
  over, not every time that it is noticed; a trouble that comes and goes is logged once in `LOG_EVERY_S`.
- A trouble that can pass without a request noticing comes with a probe, which `trouble_watch` asks every now and then.
- Every method may be called on any thread.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic

LEDGER, UPDATES, VERSIONS, CHECKPOINTS = "ledger", "updates", "versions", "checkpoints"
DESCRIPTORS, EVALUATION, REFUSED, RESULTS, TOKENS = "descriptors", "evaluation", "refused", "results", "tokens"
KEEPING = "keeping a version"
LOG_EVERY_S = 30.0

log = logging.getLogger("offbeat.server")
HasPassed = Callable[[], bool]


@dataclass(slots=True)
class OpenTrouble:
    what: str
    has_passed: HasPassed | None
    logged: bool


class OpenTroubles:
    """What is wrong now.

    >>> troubles = OpenTroubles()
    >>> troubles.note("updates", "the disk is full; make room")
    >>> troubles.note("evaluation", "version 3 could not be evaluated")
    >>> troubles.text
    'version 3 could not be evaluated; the disk is full; make room'
    >>> troubles.over("evaluation")
    >>> troubles.text
    'the disk is full; make room'
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._open: dict[str, OpenTrouble] = {}
        self._logged_at: dict[str, float] = {}

    def note(self, about: str, what: str, *, has_passed: HasPassed | None = None) -> None:
        """Something is wrong, or still is; the newest sentence counts."""
        with self._lock:
            there = self._open.get(about)
            if there is not None:
                there.what, there.has_passed = what, has_passed
                return
            logged = self._clock() >= self._logged_at.get(about, float("-inf")) + LOG_EVERY_S
            if logged:
                self._logged_at[about] = self._clock()
            self._open[about] = OpenTrouble(what, has_passed, logged)
        if logged:
            log.warning(what)

    def over(self, about: str) -> None:
        """It has passed; costs next to nothing where there was no such trouble."""
        if about not in self._open:
            return
        with self._lock:
            gone = self._open.pop(about, None)
        if gone is not None and gone.logged:
            log.info("over: %s", gone.what)

    @property
    def text(self) -> str | None:
        """All of them in one line, the newest first; None where nothing is wrong."""
        with self._lock:
            return "; ".join(one.what for one in reversed(self._open.values())) or None

    def probes(self) -> list[tuple[str, HasPassed]]:
        with self._lock:
            return [(about, one.has_passed) for about, one in self._open.items() if one.has_passed is not None]
