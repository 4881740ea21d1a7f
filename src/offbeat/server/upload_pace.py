"""Owns the question whether a body comes fast enough."""

from time import monotonic

from offbeat.server.body_receiver import BodyReceiver

MOMENT_S = 0.001


class UploadPace:
    """`rate_min` bytes per second, on average over every `window_s` of waiting, and none of them without a byte.

    Only the time for which the server waits for bytes counts, and not that for which it writes them.
    """

    def __init__(self, body: BodyReceiver, window_s: float, rate_min: int) -> None:
        self._body, self._window_s, self._rate_min = body, window_s, rate_min
        self._waited_s, self._before = 0.0, body.received
        """In this window, without the wait that is under way; and how much had come before it."""
        self._since: float | None = None

    async def wait(self) -> None:
        """Wait for something to write; `TimeoutError` where none comes for a window, or too little."""
        due, begun = False, monotonic()
        while not due:
            self._since = monotonic()
            silent_s = self._since - max(self._body.latest, begun)
            try:
                due = await self._body.wait(max(MOMENT_S, self._window_s - max(self._waited_s, silent_s)))
            finally:
                self._waited_s, self._since = self.waited_s, None
            if not due and monotonic() - max(self._body.latest, begun) >= self._window_s:
                raise TimeoutError
            if self._waited_s >= self._window_s:
                if self.is_slow:
                    raise TimeoutError
                self._waited_s, self._before = 0.0, self._body.received

    @property
    def waited_s(self) -> float:
        return self._waited_s + (0.0 if self._since is None else monotonic() - self._since)

    @property
    def is_slow(self) -> bool:
        return self._body.received - self._before < self._rate_min * self.waited_s
