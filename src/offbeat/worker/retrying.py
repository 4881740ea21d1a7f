"""Owns a worker's patience with its server: requests are repeated until they are answered, and lost sessions renewed.

Rules kept here:
- Full jitter: a worker waits for any time up to a ceiling that grows with every failure, so that a fleet which lost
  its server together does not come back together. The wait that the server asks for (Retry-After) is a minimum, up to a
  limit; the jitter comes on top of it.
- A server that does not answer is waited for: without end, or for as long as the worker was told. A refusal that
  waiting cannot change is raised.
- A server that certainly speaks http where https was asked for, or the reverse, is tried a few times, and more often
  where it had answered before: a proxy that is being changed may do that for a while. Then the worker ends.
- An outage is told when it begins and when it is over, and not in between.
- A worker that joins again says which task it holds, so that its lease stays.
- A worker that leaves does not wait for long: the server finds out by itself.
"""

from collections.abc import Callable
from contextlib import suppress
from math import inf
from random import random
from time import monotonic
from typing import TypeVar

from offbeat.errors import OffbeatError
from offbeat.worker.api_answers import RequestRefused, Unreachable
from offbeat.worker.api_client import ApiClient
from offbeat.worker.interrupts import Interrupts
from offbeat.worker.other_scheme import WrongScheme

ASKED_MAX_S = 3600.0
"""A server that asks for more than this is asked again after this."""
LEAVE_S, AWAY_S = 2.0, 1.0
"""How long handing back and saying goodbye may take; and how long where the server did not answer a moment ago."""
REJOINS_MAX = 20
"""Times that a worker joins again without having done anything in between."""

MISTAKEN_AT_FIRST_MAX, MISTAKEN_MAX = 3, 20
"""Tries in a row at a server that speaks http for https, or the reverse: before it ever answered, and after."""

Say = Callable[[str], None]
T = TypeVar("T")


class Backoff:
    """How long to wait after each failure in a row.

    >>> from random import Random
    >>> backoff = Backoff(first_s=0.5, longest_s=4.0, draw=Random(1).random)
    >>> [round(backoff.next(), 2) for _ in range(6)]
    [0.07, 0.85, 1.53, 1.02, 1.98, 1.8]
    >>> round(backoff.next(at_least_s=30), 2)
    32.61
    """

    def __init__(self, first_s: float = 0.5, longest_s: float = 60.0, draw: Callable[[], float] = random) -> None:
        self.first_s, self.longest_s, self._draw = first_s, longest_s, draw
        self._ceiling_s = first_s

    def next(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait now; `at_least_s` is what the server asked for, and less than 0 counts as 0."""
        wait_s = min(max(at_least_s, 0.0), ASKED_MAX_S) + self._ceiling_s * self._draw()
        self._ceiling_s = min(self.longest_s, 2 * self._ceiling_s)
        return wait_s

    def reset(self) -> None:
        """It worked: the next failure is the first one again."""
        self._ceiling_s = self.first_s


class ServerLost(OffbeatError):
    """The server could not be reached for as long as the worker was told to wait for it."""


class Outages:
    """What does not work now: told once, and tried again after a wait that grows."""

    def __init__(
        self, backoff: Backoff, wait: Callable[[float], None], say: Say, give_up_after: float | None = None
    ) -> None:
        self._backoff, self._wait, self._say = backoff, wait, say
        self._give_up_after = inf if give_up_after is None else give_up_after
        self._away_since = inf
        self._told: str | None = None
        self.away = False
        """Was there no answer when the server was last tried?"""

    def wait(self, error: OffbeatError) -> None:
        refused = error if isinstance(error, RequestRefused) else None
        word = refused.error if refused else type(error).__name__
        self.away = isinstance(error, Unreachable) or word == ""  # a proxy answers for a server that is not there
        kind = "away" if self.away else word
        if self._told != kind:
            self._told = kind
            how_long = "a few times more" if isinstance(error, WrongScheme) else "again until it works"
            self._say(f"{str(error).rstrip('.')}; trying {how_long}")
        self._wait(
            min(self._backoff.next(at_least_s=(refused and refused.retry_after_s) or 0.0), self._patience(error))
        )

    def _patience(self, error: OffbeatError) -> float:
        """How long a server that is away is waited for yet; one that says no is there."""
        now = monotonic()
        self._away_since = min(self._away_since, now) if self.away else inf
        left = self._away_since + self._give_up_after - now if self.away else inf
        if left <= 0:
            raise ServerLost(f"the server could not be reached for {self._give_up_after:g} s: {error}")
        return left

    def over(self) -> None:
        if self.away:
            self._say("the server answers again")
        self._told, self.away, self._away_since = None, False, inf
        self._backoff.reset()


class RetryingClient:
    """Speaks to the server for the main thread."""

    def __init__(
        self,
        client: ApiClient,
        interrupts: Interrupts,
        backoff: Callable[[], Backoff],
        say: Say,
        give_up_after: float | None = None,
    ) -> None:
        self.client, self.interrupts, self._say = client, interrupts, say
        self.outages = Outages(backoff(), interrupts.wait, say, give_up_after)
        self.task: int | None = None
        """The task that is leased to this worker, as far as it knows."""
        self._pauses = backoff()
        self._rejoins = self._paused = self._mistaken = 0

    def answered(self, call: Callable[[], T]) -> T:
        while True:
            stale = self.client.session
            try:
                with self.interrupts.allowed():
                    answer = call()
            except RequestRefused as refused:
                if refused.error == "unknown_session":
                    self._join_again(stale)
                    continue
                # one without a word of ours is a proxy's, which speaks for a server that we know and that is restarted
                by_proxy = bool(stale) and not refused.error
                if refused.for_good or not (refused.temporary or by_proxy):
                    raise
                self.outages.wait(refused)
            except WrongScheme as error:
                self._mistaken += 1
                if self._mistaken >= (MISTAKEN_MAX if stale else MISTAKEN_AT_FIRST_MAX):
                    raise
                self.outages.wait(error)
            except Unreachable as error:
                self.outages.wait(error)
            else:
                self._mistaken = 0
                self.outages.over()
                return answer

    def _join_again(self, stale: str) -> None:
        self._rejoins += 1
        if self._rejoins > REJOINS_MAX:
            raise OffbeatError("the server forgets this worker time and again; give each its own --name, or token")
        self.pause()
        self.answered(lambda: self.client.rejoin(stale, self.task))
        self._say("joined again: the server did not know this worker any more, or another one has its name")

    def pause(self, *, free: int = 0) -> None:
        """Wait a little, longer each time until something is done; the first `free` times not at all."""
        self._paused += 1
        if self._paused > free:
            self.interrupts.wait(self._pauses.next())

    def progress(self) -> None:
        """Something was done: the next pause is a short one."""
        self._rejoins = self._paused = 0
        self._pauses.reset()

    def hand_back(self) -> None:
        task = self.task
        if task is not None:
            with suppress(RequestRefused):  # then it is not ours any more
                self.answered(lambda: self.client.hand_back(task))
        self.task = None

    def goodbye(self, *, handing_back: bool = False) -> None:
        if not self.client.session:
            return
        self.client.http.hurry(AWAY_S if self.outages.away else LEAVE_S)
        with suppress(OffbeatError):
            if handing_back and self.task is not None:
                self.client.hand_back(self.task)
            self.client.leave()
