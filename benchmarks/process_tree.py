"""Owns the processor time and the peak memory of a process and its children while they run.

It reads /proc, which only Linux has; elsewhere the network benchmark is refused.
"""

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from offbeat.errors import OffbeatError

PROC = Path("/proc")
KIB = 1024


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    """The largest resident size so far, mapped files included."""
    own: int
    """The size now, without mapped files and memory shared with other processes."""


def refuse_elsewhere() -> None:
    if not (PROC / "self" / "status").is_file():
        raise OffbeatError("the network benchmark reads memory and processor time from /proc; run it on Linux")


def family(pid: int) -> list[psutil.Process]:
    """A process that has not been waited for, and every process that it started."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def cpu_s(pid: int) -> float:
    """Processor time of the family so far; that of children that have ended is in their parent's."""
    seconds = 0.0
    for one in family(pid):
        with suppress(psutil.NoSuchProcess):
            used = one.cpu_times()
            seconds += used.user + used.system + used.children_user + used.children_system
    return seconds


def memory(pid: int) -> Memory:
    """Memory of the family."""
    each = [_memory(one.pid) for one in family(pid)]
    return Memory(sum(one.peak for one in each), sum(one.own for one in each))


def _memory(pid: int) -> Memory:
    try:
        lines = (PROC / str(pid) / "status").read_text().splitlines()
    except OSError:
        return Memory(0, 0)
    facts = {line.partition(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return Memory(KIB * int(facts.get("VmHWM", 0)), KIB * int(facts.get("RssAnon", 0)))
