"""Owns `python -m tests.simulation.many_faults SEEDS`: very many seeds of fault injection, over all cores, counted.

Rules kept here:
- A seed is checked exactly as `faults.run` checks it in the tests: after every event, and for its end.
- Every other seed goes through the rules of `rule_cases.py`, one after the other.
- The first seed that fails stops everything, and is told with the command that replays it. Seeds are handed out in
  order and in small portions: a failure is among the first that there are, though not always the very first.
"""

import argparse
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.simulation import faults
from tests.simulation.rule_cases import RULE_CASES

PORTION = 20
"""Seeds that a process is handed at a time."""
TELL_S = 10.0
COLLECT_AFTER = 50_000
"""Objects after which Python looks for unused ones; runs are short, so that it finds few, and it takes a sixth of the
time with the default of 700."""


class SeedCounts(NamedTuple):
    """What happened under one seed, and what was wrong, if anything."""

    seed: int
    events: int = 0
    applied: int = 0
    duplicates: int = 0
    restarts: int = 0
    outcomes: Counter[str] | None = None
    failure: str | None = None


@dataclass
class FaultTotals:
    """The counts of all seeds so far."""

    seeds: int = 0
    sums: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, one: SeedCounts) -> None:
        self.seeds += 1
        self.sums.update({name: getattr(one, name) for name in ("events", "applied", "duplicates", "restarts")})
        self.outcomes.update(one.outcomes or {})

    def words(self, seconds: float) -> str:
        outcomes = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return (
            f"{self.seeds:,} seeds in {seconds:,.0f} s ({self.seeds / max(seconds, 1e-9):.1f} per second): "
            f"{self.sums['events']:,} events, each checked; {self.sums['applied']:,} updates applied once, "
            f"{self.sums['duplicates']:,} pushed again, {self.sums['restarts']:,} restarts of the server.\n"
            f"Pushes were answered: {outcomes}."
        )


def case_of(seed: int) -> str:
    """The rule that goes with a seed; empty where the seed draws it."""
    return [*RULE_CASES][seed // 2 % len(RULE_CASES)] if seed % 2 else ""


def one_seed(seed: int) -> SeedCounts:
    try:
        watch = faults.run(seed, case_of(seed))
    except Exception:
        return SeedCounts(seed, failure=traceback.format_exc())
    outcomes = Counter({outcome.value: count for outcome, count in watch.outcomes.items()})
    counts = (len(watch.events), len(watch.applied), watch.duplicates, watch.restarts)
    return SeedCounts(seed, *counts, outcomes)


def counted(found: Iterable[SeedCounts], tell: Callable[[FaultTotals], None]) -> tuple[FaultTotals, SeedCounts | None]:
    """Add up what comes, until a seed fails; answers with that seed, if there was one."""
    totals, told = FaultTotals(), time.monotonic()
    for one in found:
        if one.failure is not None:
            return totals, one
        totals.add(one)
        if time.monotonic() - told > TELL_S:
            told = time.monotonic()
            tell(totals)
    return totals, None


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.many_faults", description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="default: one per core")
    given = parser.parse_args(arguments)
    began, seeds = time.monotonic(), range(given.first, given.first + given.seeds)

    def tell(totals: FaultTotals) -> None:
        left_s = (time.monotonic() - began) / totals.seeds * (len(seeds) - totals.seeds)
        sys.stderr.write(f"{totals.seeds:,} of {len(seeds):,} seeds, {left_s / 60:.0f} minutes to go\n")
        sys.stderr.flush()

    with multiprocessing.get_context("spawn").Pool(given.processes, gc.set_threshold, (COLLECT_AFTER,)) as pool:
        totals, failed = counted(pool.imap(one_seed, seeds, PORTION), tell)
    sys.stdout.write(f"Seeds {seeds.start} to {seeds.stop - 1}. {totals.words(time.monotonic() - began)}\n")
    if failed is not None:
        sys.stdout.write(f"{failed.failure}\nSeed {failed.seed} failed. Replay it: {replay_of(failed.seed)}\n")
    return 0 if failed is None else 1


def replay_of(seed: int) -> str:
    return f"python -m tests.simulation.faults {seed} {case_of(seed)}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
