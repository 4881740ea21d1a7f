"""Owns that a version is kept before the ledger says what it is worth: the one that reaches the target, and the best.

Rules kept here:
- Evaluations of one run are told by one thread at a time, so what is best so far does not change while it is looked at.
- Where the disk is full, an evaluation waits until its version can be kept.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress

from offbeat.core.layout import Model
from offbeat.errors import OffbeatError
from offbeat.protocol.messages import Command, Evaluated
from offbeat.protocol.wanted import may_want, would_want
from offbeat.server.evaluator import Evaluator
from offbeat.server.served_run import ServedRun
from offbeat.wire import mapped

RETRY_S = 5.0


class VersionKeeper:
    def __init__(self, run: ServedRun, troubled: Callable[[str | None], None]) -> None:
        """`troubled` hears why a version cannot be kept, and None when it can again."""
        self._run, self._troubled = run, troubled

    def evaluated(self, t: int, metrics: Mapping[str, float], evaluator: Evaluator) -> None:
        """On the evaluator's thread: keep the version if it is wanted, tell, let go of what is not wanted any more."""
        c, kept = self._run.coordinator, self._run.kept
        if would_want(c, Evaluated(c.at, t, metrics)) and not self._is_kept(t, evaluator):
            return
        with suppress(OffbeatError):  # the driver has failed, which is known elsewhere
            self._tell(t, metrics).result()
            if may_want(c):
                kept.settle(c.outcome.kept, c.outcome.best_t)

    def reported(self, tau: int, metrics: Mapping[str, float], pool: Executor) -> None:
        """Workers measured this version; where it reaches the target it is kept, if it is still there."""
        c, x = self._run.coordinator, self._run.versions.pull(tau)
        if x is not None and would_want(c, Evaluated(c.at, tau, metrics)):
            pool.submit(self._keep_and_tell, tau, metrics, x)
        else:
            self._tell(tau, metrics)

    def _keep_and_tell(self, tau: int, metrics: Mapping[str, float], x: Model) -> None:
        with suppress(OSError):  # then the newest version is the result
            self._run.kept.keep(tau, x)
        self._tell(tau, metrics)

    def _tell(self, t: int, metrics: Mapping[str, float]) -> "Future[list[Command]]":
        return self._run.driver.tell(lambda at: Evaluated(at, t, metrics), must=True)

    def _is_kept(self, t: int, evaluator: Evaluator) -> bool:
        """Keep what was evaluated just now. False where the server stops before that can be done."""
        while True:
            try:
                mean = None if evaluator.mean_file is None else mapped(evaluator.mean_file, self._run.layout)
                self._run.kept.keep(t, mapped(evaluator.file, self._run.layout), mean)
            except OSError as error:
                self._troubled(f"version {t} cannot be kept; this is tried again: {error}")
                if evaluator.pause(RETRY_S):
                    return False
            else:
                self._troubled(None)
                return True
