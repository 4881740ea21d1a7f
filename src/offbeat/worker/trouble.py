"""Owns what a worker does when something does not work now: say so once, wait, longer each time, and try again."""

from collections.abc import Callable

from offbeat.errors import OffbeatError
from offbeat.worker.answers import Refused, Unreachable
from offbeat.worker.backoff import Backoff

Say = Callable[[str], None]
Wait = Callable[[float], None]


class Trouble:
    """One outage after another; each is told when it begins and when it is over, and not in between."""

    def __init__(self, backoff: Backoff, wait: Wait, say: Say) -> None:
        self._backoff, self._wait, self._say = backoff, wait, say
        self._told: str | None = None
        self.away = False
        """Was there no answer when the server was last tried?"""

    def after(self, error: OffbeatError) -> None:
        """Wait before another try."""
        word = error.error if isinstance(error, Refused) else type(error).__name__
        self.away = isinstance(error, Unreachable) or word == ""  # a proxy answers for a server that is not there
        kind = "away" if self.away else word
        if self._told != kind:
            self._told = kind
            self._say(f"{str(error).rstrip('.')}; trying again until it works")
        asked_s = error.retry_after_s if isinstance(error, Refused) else None
        self._wait(self._backoff.next(at_least_s=asked_s or 0.0))

    def over(self) -> None:
        """It works."""
        if self.away:
            self._say("the server answers again")
        self._told, self.away = None, False
        self._backoff.reset()
