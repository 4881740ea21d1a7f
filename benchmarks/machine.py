"""Owns the facts that go with every figure: the machine, how busy it was, and the commit of the code."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

from offbeat.hosting.child import cores

ROOT = Path(__file__).parents[1]
"""The folder of the repository."""
PACKAGES = ("numpy", "numba", "torch", "aiohttp", "uvloop")
BUSY = 0.5
"""A load of more than this, before anything was measured, is somebody else's."""


class Machine:
    """The machine and its load, when a run begins and when it ends."""

    def __init__(self) -> None:
        self._begun_at = datetime.now(UTC)
        self._load = _load()

    @property
    def busy(self) -> bool:
        """Was there other work when the run began?"""
        return self._load > BUSY

    def facts(self) -> dict[str, Any]:
        """Date, machine, load, versions, commit."""
        return {
            "date": self._begun_at.strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round((datetime.now(UTC) - self._begun_at).total_seconds()),
            "cpu": _cpu(),
            "cores": cores(),
            "memory_gb": round(_memory("MemTotal") / 1e9, 1),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "packages": {name: found for name in PACKAGES if (found := _version(name))},
            "load_at_start": self._load,
            "load_at_end": _load(),
            "commit": commit(),
        }


def memory_available() -> int:
    """Bytes that are free; a large number where the system does not report it."""
    return _memory("MemAvailable") or 1 << 40


def commit() -> str | None:
    """The commit of the repository, with a plus where files were changed; None outside of git."""
    git = which("git")
    if git is None or not (ROOT / ".git").exists():
        return None

    def ask(*arguments: str) -> str:
        done = subprocess.run([git, "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)  # noqa: S603
        return done.stdout.strip()

    name = ask("rev-parse", "--short=12", "HEAD")
    return (name + ("+" if ask("status", "--porcelain", "--untracked-files=no") else "")) or None


def _load() -> float:
    """The load average of the last minute."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory(name: str) -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
