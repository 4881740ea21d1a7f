"""Owns the versions that a replay needs again as x_tau: from their files where these hold the same bits, else kept.

Of those that are kept, a few are in memory and the others in temporary files, mapped: what a replay needs in memory is
bounded by the model, however far an update lies behind.
"""

import tempfile
from pathlib import Path

import numpy as np

from offbeat.core.layout import Model
from offbeat.protocol.messages import Decision
from offbeat.server.version_store import VersionStore
from offbeat.wire import body_of, header_of, mapped, unload

IN_MEMORY_MAX = 1
"""Versions that are kept in memory."""


class Bases:
    def __init__(self, versions: VersionStore, last_uses: dict[int, int]) -> None:
        """`last_uses` says, by tau, the number of the last decision that uses x_tau."""
        self._versions, self._last_uses = versions, last_uses
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.held: dict[int, Model] = {}
        self.in_memory: set[int] = set()
        self.unlike: list[int] = []
        """Versions whose files hold other bits than they were offered with."""

    def offer(self, t: int, x: Model) -> None:
        """A version was made: keep it if it will be used."""
        if t in self._last_uses:
            self.held[t] = self._file_of(t, x) or self._kept(t, x)

    def of(self, tau: int) -> Model:
        return self.held[tau] if tau in self.held else self._versions.of(tau)

    def wants(self, t: int) -> bool:
        """Will this version be used?"""
        return t in self._last_uses

    def used_by(self, decision: Decision) -> None:
        """Let go of what this decision was the last to use."""
        tau = decision.lease.tau
        if tau in self.held:
            unload([self.held[tau].vector], at_least=0)
        if self._last_uses.get(tau) == decision.sequence and self.held.pop(tau, None) is not None:
            self.in_memory.discard(tau)
            if self._folder is not None:
                self._temporary(self._folder, tau).unlink(missing_ok=True)

    def close(self) -> None:
        self.held.clear()
        if self._folder is not None:
            self._folder.cleanup()

    def _kept(self, t: int, x: Model) -> Model:
        if len(self.in_memory) < IN_MEMORY_MAX:
            self.in_memory.add(t)
            return x
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="offbeat-replay-")
        path = self._temporary(self._folder, t)
        with path.open("wb") as file:
            file.writelines([header_of(x.layout), *body_of(x)])
        return mapped(path, x.layout)

    @staticmethod
    def _temporary(folder: "tempfile.TemporaryDirectory[str]", t: int) -> Path:
        return Path(folder.name) / f"{t}.safetensors"

    def _file_of(self, t: int, x: Model) -> Model | None:
        """The version as its file has it, mapped, which takes no memory; None where it is missing or differs."""
        try:
            there = mapped(self._versions.file(t), x.layout)
        except (OSError, ValueError):
            return None
        same = np.array_equal(there.vector.view(np.uint32), x.vector.view(np.uint32))
        unload([there.vector], at_least=0)
        if not same:
            self.unlike.append(t)
        return there if same else None
