"""Owns who has joined: names, numbers, devices, and the secrets by which a worker's requests are known to be its own.

Rules kept here:
- A name keeps its number for ever, over restarts of either side; the ledger is where this is remembered.
- Workers join at the same time, and wait for the disk together; no two of them are given one number or one free device.
- A secret is made anew whenever a worker joins, so of two processes under one name the older one is shut out. Only a
  digest of it is kept.
"""

import hmac
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from offbeat.protocol.messages import WorkerJoined
from offbeat.server.access import digest_of

SECRET_BYTES = 24


@dataclass(slots=True)
class WorkerSession:
    worker: int
    name: str
    device: int
    digest: str
    """sha256 of its secret; empty once it has left."""
    samples: int | None = None
    """Those that every push of it must claim, once they are known."""
    base: str = ""
    """Digest of the base of its model, where this process has declared it."""
    base_missed: bool = False
    """Was it said in the log that it declared none?"""
    progress: float | None = None
    """How far it says it is with its task."""
    asking: bool = False


class WorkerSessions:
    """All workers that ever joined a run."""

    def __init__(self, state: Iterable[Sequence[Any]] = ()) -> None:
        """`state` is what another one gave."""
        self._of: dict[int, WorkerSession] = {}
        self._number: dict[str, int] = {}
        self._next = 0
        self._on: Counter[int] = Counter()
        self._free = 0
        """No device below this one is free."""
        self._coming: set[str] = set()
        """New names that are about to join."""
        self.restore(state)

    def __len__(self) -> int:
        return len(self._of)

    def all(self) -> list[WorkerSession]:
        """In the order in which they first joined."""
        return list(self._of.values())

    def known(self, name: str) -> WorkerSession | None:
        number = self._number.get(name)
        return None if number is None else self._of.get(number)

    def of(self, worker: int) -> WorkerSession | None:
        return self._of.get(worker)

    def number(self, name: str) -> int:
        """The number of this name, or the next free one, which it keeps even if it does not join after all."""
        if name not in self._number:
            self._number[name] = self._next
            self._next += 1
        return self._number[name]

    def device(self, name: str, devices: int) -> int:
        """A device for a worker that did not choose: the one it had before, else one that no other worker has."""
        known = self.known(name)
        if known is not None:
            return known.device
        free = self._free
        while free < devices and self._on[free]:
            free += 1
        self._free = free
        return free if free < devices else (len(self._of) + len(self._coming)) % devices

    def has_room(self, name: str, workers_max: int) -> bool:
        """May a worker of this name join, where no more than these may?"""
        return self.known(name) is not None or len(self._of) + len(self._coming) < workers_max

    @contextmanager
    def coming(self, name: str, device: int) -> Iterator[None]:
        """While a worker joins: its device is not free, and its place is taken."""
        if self.known(name) is None:
            self._coming.add(name)
        self._on[device] += 1
        try:
            yield
        finally:
            self._coming.discard(name)
            self._leave(device)

    def take(self, event: WorkerJoined) -> WorkerSession:
        before = self._of.get(event.worker)
        if before is not None:
            self._leave(before.device)
        samples = None if before is None or before.device != event.device else before.samples
        session = WorkerSession(event.worker, event.name, event.device, event.session, samples)
        self._of[event.worker], self._number[event.name] = session, event.worker
        self._next = max(self._next, event.worker + 1)
        self._on[event.device] += 1
        self._coming.discard(event.name)
        return session

    def _leave(self, device: int) -> None:
        self._on[device] -= 1
        if not self._on[device]:
            self._free = min(self._free, device)

    def declared(self, worker: int, samples: int | None, base: str) -> None:
        """From now on the worker is held to this."""
        if worker in self._of:
            self._of[worker].samples, self._of[worker].base = samples, base

    def left(self, worker: int) -> None:
        if worker in self._of:
            self._of[worker].digest = ""

    def state(self) -> list[list[Any]]:
        """What has to outlast a restart, as plain JSON: a line for every worker."""
        return [[s.worker, s.name, s.device, s.digest, s.samples, s.base] for s in self._of.values()]

    def restore(self, state: Iterable[Sequence[Any]]) -> None:
        for worker, name, device, digest, samples, base in state:
            self.take(WorkerJoined(0.0, worker, device, name, digest))
            self.declared(worker, samples, base)

    def find(self, secret: str) -> WorkerSession | None:
        session = self.named_in(secret)
        return session if session is not None and hmac.compare_digest(session.digest, digest_of(secret)) else None

    def named_in(self, secret: str) -> WorkerSession | None:
        """The worker whose number a secret begins with, unless it has left."""
        number, _, _ = secret.partition("-")
        plain = number.isascii() and number.isdecimal() and len(number) < SECRET_BYTES
        session = self._of.get(int(number)) if plain else None
        return session if session is not None and session.digest else None


def new_secret(worker: int) -> str:
    """A secret; it begins with the worker's number."""
    return f"{worker}-{secrets.token_urlsafe(SECRET_BYTES)}"
