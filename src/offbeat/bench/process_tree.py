"""Owns what is known of a process and its children while they run: processor time, and the most memory they had.

It reads /proc, which Linux has; elsewhere the network benchmark says that it cannot be run.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from offbeat.errors import OffbeatError

PROC = Path("/proc")
KIB = 1024


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    """The high-water mark of what was resident, mapped files included."""
    own: int
    """What is the process's own now: neither mapped from files nor shared with others."""


def refuse_elsewhere() -> None:
    """Say where it works, where it does not."""
    if not (PROC / "self" / "status").is_file():
        raise OffbeatError("the network benchmark reads memory and processor time from /proc; run it on Linux")


def tree(process: int) -> list[int]:
    """The process and all that it started."""
    found, waiting = [process], [process]
    while waiting:
        children = _children(waiting.pop())
        found += children
        waiting += children
    return found


def cpu_s(process: int) -> float:
    """Processor time of the tree so far; that of children that have ended is in their parent's."""
    ticks = 0
    for number in tree(process):
        with suppress(OSError):
            ticks += sum(int(part) for part in _stat(number)[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> Memory:
    """Of the tree."""
    each = [_memory(number) for number in tree(process)]
    return Memory(sum(one.peak for one in each), sum(one.own for one in each))


def _memory(number: int) -> Memory:
    try:
        lines = (PROC / str(number) / "status").read_text().splitlines()
    except OSError:
        return Memory(0, 0)
    facts = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return Memory(KIB * int(facts.get("VmHWM", 0)), KIB * int(facts.get("RssAnon", 0)))


def _children(number: int) -> list[int]:
    found: list[int] = []
    for path in (PROC / str(number) / "task").glob("*/children"):
        with suppress(OSError):
            found += [int(child) for child in path.read_text().split()]
    return found


def _stat(number: int) -> list[str]:
    """The fields behind the name, which may hold anything; the first is the state."""
    return (PROC / str(number) / "stat").read_text().rpartition(")")[2].split()
