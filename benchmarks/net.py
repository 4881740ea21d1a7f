"""Owns the benchmark of serving: updates per second, processor time, memory and waiting times, beside raw sockets.

Rules kept here:
- Server and workers are the real ones, as processes; training is trivial. All share this machine and its disk.
- The raw exchange syncs to the server's disk as ours does. Our workers also sync every update to their own disk before
  they send it; a raw exchange with that is measured as well.
"""

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path

from benchmarks import idle
from benchmarks.bars import MB
from benchmarks.exchange import Measured
from benchmarks.process_tree import refuse_elsewhere
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.served import BYTES, ours, raw
from benchmarks.turns import Tell, Turns, take_turns

OURS, RAW, BOTH, UNSYNCED, UNSYNCED_RAW, TLS = (
    *("durable", "raw", "raw, synced at both ends"),
    *("not durable", "raw, not synced", "durable, TLS"),
)
DISK_PER_MB = 250
"""Updates that may be on the disk at once: the free space that a size needs, in models."""
Exchange = Callable[..., Measured]


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Every size, then idle workers."""
    refuse_elsewhere()
    for mb in scale.net_mb:
        if shutil.disk_usage(folder).free < mb * MB * DISK_PER_MB:
            results.skip(f"net, {mb} MB: {folder} has too little room on its disk")
            continue
        _measure(results, scale, tell, folder, mb)
    idle.run(results, scale, tell, folder)


def _measure(results: Results, scale: Scale, tell: Tell, folder: Path, mb: int) -> None:
    seen: dict[str, list[Measured]] = {}
    numbers, size = count(), mb * MB // BYTES
    seconds = scale.net_s * (1 + mb / 50)

    def once(name: str, exchange: Exchange) -> float:
        place = folder / f"net-{mb}-{next(numbers)}"
        try:
            found = exchange(place, size, seconds)
        finally:
            shutil.rmtree(place, ignore_errors=True)
        seen.setdefault(name, []).append(found)
        return found.updates_per_s

    contestants = {name: partial(once, name, exchange) for name, exchange in _exchanges(scale).items()}
    turns = take_turns(contestants, scale.net_turns, tell, f"net, {mb} MB")
    _put(results, mb, turns, seen)


def _exchanges(scale: Scale) -> dict[str, Exchange]:
    main: dict[str, Exchange] = {OURS: ours, RAW: raw}
    if not scale.net_variants:
        return main
    return main | {
        BOTH: partial(raw, outbox=True),
        UNSYNCED: partial(ours, durable=False),
        UNSYNCED_RAW: partial(raw, durable=False),
        TLS: partial(ours, tls=True),
    }


def _put(results: Results, mb: int, turns: Turns, seen: dict[str, list[Measured]]) -> None:
    what = f"net, {mb} MB"
    if mb == 10:
        results.put_turns("net_10mb_raw", turns, OURS, RAW)
    if mb == 100:
        results.put("net_100mb_memory", max(one.memory.peak for one in seen[OURS]) / MB)
    against = {OURS: RAW, UNSYNCED: UNSYNCED_RAW, TLS: OURS}
    for name in [name for name in (OURS, UNSYNCED, TLS) if name in seen]:
        results.note_turns(f"{what}, {name}, against {against[name]}", "updates/s", turns, name, against[name])
        _note(results, f"{what}, {name}", seen[name])
    if BOTH in seen:
        results.note_turns(f"{what}, {OURS}, against {BOTH}", "updates/s", turns, OURS, BOTH)
    _note(results, f"{what}, {RAW}", seen[RAW])


def _note(results: Results, what: str, seen: list[Measured]) -> None:
    """Figures of the median turn by updates per second; the largest memory of all turns."""
    middle = sorted(seen)[len(seen) // 2]
    results.note(f"{what}, server's processor time per update", 1e3 * middle.server_cpu_s, "ms")
    results.note(f"{what}, push to acknowledgement, p50", 1e3 * middle.p50_s, "ms")
    results.note(f"{what}, push to acknowledgement, p99", 1e3 * middle.p99_s, "ms")
    results.note(f"{what}, server's peak memory", max(one.memory.peak for one in seen) / MB, "MB")
