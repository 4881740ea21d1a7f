"""Owns the answers of a run that is looked at: worked out off the event loop, once for all visitors.

Rules kept here:
- An answer is worked out anew when the ledger has grown, at most about once a second however many visitors there are.
- A browser that was told of row N (`run_watch`) and asks gets an answer with row N.
"""

import asyncio
import gzip
import json
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from offbeat.web.run_reader import RunReader

T = TypeVar("T")
THREADS = 2
ANSWERS_MAX = 50
"""Answers that are kept of one run: each view, with the filters that are in use."""
PACKED_FROM_BYTES = 4096
PACKING_LEVEL = 1


@dataclass(frozen=True, slots=True)
class PackedJson:
    """JSON, as it is and packed where that is worth it."""

    body: bytes
    packed: bytes | None

    @classmethod
    def of(cls, value: Any) -> "PackedJson":
        body = json.dumps(value, allow_nan=False, separators=(",", ":")).encode()
        return cls(body, gzip.compress(body, PACKING_LEVEL, mtime=0) if len(body) >= PACKED_FROM_BYTES else None)


class Shown:
    """A run, as those on the event loop see it."""

    def __init__(self, reading: RunReader, pool: ThreadPoolExecutor) -> None:
        self.reading, self._pool = reading, pool
        self._answers: OrderedDict[Hashable, tuple[tuple[int, int], PackedJson]] = OrderedDict()

    async def off_loop(self, work: Callable[[], T]) -> T:
        """Run blocking work on another thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def answer(self, key: Hashable, make: Callable[[RunReader], Any]) -> PackedJson:
        """What `make` says of the run as it is now; the same key means the same answer."""
        return await self.off_loop(lambda: self.answer_now(key, make))

    def answer_now(self, key: Hashable, make: Callable[[RunReader], Any]) -> PackedJson:
        """As `answer`, on this thread."""
        reading = self.reading
        with reading.lock:
            moment = (reading.refresh(), int(reading.now()))  # a server's clock goes on while nothing happens
            kept = self._answers.pop(key, None)
            if kept is None or kept[0] != moment:
                kept = (moment, PackedJson.of(make(reading)))
            self._answers[key] = kept
            while len(self._answers) > ANSWERS_MAX:
                self._answers.popitem(last=False)
            return kept[1]
