"""Owns the runs of a comparison on a Ray cluster: shares go out to actors, finished runs come back.

Rules kept here:
- A run's folder is here when the run is finished, or when the comparison is stopped; nodes need no disk in common.
- What a node had not finished when it was lost is begun again elsewhere from what is here: run by run, so that a run
  that takes its actor with it takes no other.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.sim.lockstep import Failure, Tell
from offbeat.sim.on_ray.cluster import Call, Cluster, Lost
from offbeat.sim.on_ray.crew import ACTOR_WAIT_S, FALSE_STARTS_MAX
from offbeat.sim.on_ray.executor import Hiring
from offbeat.sim.on_ray.folders import arrived, packed_folder
from offbeat.sim.on_ray.sharer import News, Sharer
from offbeat.sim.on_ray.sources import Sources, sources_of
from offbeat.sim.on_ray.trainer import refuse_other_packages
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import ComparedRun
from offbeat.storage.run_folder import SUMMARY

LOST_MAX = 3
"""Actors that one run may take with it."""
LISTEN_S = 0.1
"""How long the driver listens before it looks whether it should stop."""


def run_on_ray(
    task_spec: str,
    entries: Sequence[ComparedRun],
    tell: Tell,
    *,
    pictures: bool = False,
    address: str | None = None,
    count: int | None = None,
    connect: Callable[[str | None], Hiring] = Cluster,
) -> list[Failure]:
    """Run these in `count` shares, one per CPU where that is not said, and return what failed."""
    cluster = connect(address)
    try:
        count = count or cluster.places(0.0)
        shares = Shares(cluster, sources_of(task_spec), pictures=pictures)
        try:
            return shares.run([share for number in range(count) if (share := [*entries[number::count]])], tell)
        finally:
            shares.close()
    finally:
        cluster.close()


@dataclass(eq=False, slots=True)
class Abroad:
    """A share on some node."""

    actor: Any
    share: list[ComparedRun]
    call: Call
    is_here: bool = False
    far: float = 0.0
    back: set[int] = field(default_factory=set)
    """Runs that came back, by their number in the share."""


class Shares:
    """All shares, those that wait for an actor and those that have one."""

    def __init__(self, cluster: Hiring, sources: Sources, *, pictures: bool) -> None:
        self._cluster, self._sources, self._pictures = cluster, sources, pictures
        self._waiting: deque[list[ComparedRun]] = deque()
        self._abroad: list[Abroad] = []
        self._failures: list[Failure] = []
        self._lost: Counter[ComparedRun] = Counter()
        self._over, self._false_starts, self._heard = 0, 0, monotonic()

    def run(self, shares: Sequence[list[ComparedRun]], tell: Tell) -> list[Failure]:
        """Run all to their ends; `tell` hears how many runs are done, and may raise `StopRequested`."""
        self._waiting.extend(shares)
        try:
            while self._waiting or self._abroad:
                while self._waiting and len(self._abroad) < len(shares):
                    self._begin(self._waiting.popleft())
                self._listen()
                tell(self._over + sum(max(abroad.far - len(abroad.back), 0.0) for abroad in self._abroad))
        except StopRequested:
            self._stop()
            raise
        return self._failures

    def close(self) -> None:
        """End all actors."""
        for abroad in self._abroad:
            self._cluster.dismiss(abroad.actor)

    def _begin(self, share: list[ComparedRun]) -> None:
        try:
            begun = [packed_folder(entry.folder) for entry in share]
        except (InvalidValue, OSError) as error:
            self._fail(share, str(error))
            return
        actor = self._cluster.hire(Sharer, self._sources, share, begun, self._pictures, str(Path.cwd()))
        self._abroad.append(Abroad(actor, share, self._cluster.call(actor, "hello")))

    def _stop(self) -> None:
        """Those that have begun send back where they stand; the others have nothing to tell."""
        self._waiting.clear()
        for abroad in self._abroad:
            if not abroad.is_here:
                self._cluster.dismiss(abroad.actor)
        self._abroad = [abroad for abroad in self._abroad if abroad.is_here]
        for abroad in self._abroad:
            self._cluster.call(abroad.actor, "stop")
        while self._abroad:
            self._listen()
            self._waiting.clear()  # of one that is lost now, what is here stays

    # --- news --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        speaking = {abroad.call: abroad for abroad in self._abroad}
        for call in self._cluster.ended([*speaking], LISTEN_S):
            try:
                self._hear(speaking[call])
                self._heard = monotonic()
            except Lost as lost:
                self._redo(speaking[call], lost)
        if self._abroad and monotonic() - self._heard > ACTOR_WAIT_S:
            raise OffbeatError(f"the Ray cluster told nothing for {ACTOR_WAIT_S:.0f} s; is it busy with other work?")

    def _hear(self, abroad: Abroad) -> None:
        answer = self._cluster.answer(abroad.call)
        if not abroad.is_here:
            refuse_other_packages(answer)
            abroad.is_here, self._false_starts = True, 0
        elif self._take(abroad, answer):
            return
        abroad.call = self._cluster.call(abroad.actor, "news")

    def _take(self, abroad: Abroad, news: News) -> bool:
        """Was it the last?"""
        abroad.far = news.far
        if news.number is not None:
            arrived(news.files, abroad.share[news.number].folder)
            if SUMMARY in news.files:
                abroad.back.add(news.number)
                self._over += 1
        if news.failures is None:
            return False
        self._failures += news.failures
        self._over += len(news.failures)
        self._end(abroad)
        return True

    def _end(self, abroad: Abroad) -> None:
        self._abroad.remove(abroad)
        self._cluster.dismiss(abroad.actor)

    def _redo(self, abroad: Abroad, lost: Lost) -> None:
        """What has not come back waits again, each run for itself, before all others."""
        self._end(abroad)
        if not abroad.is_here:
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS_MAX + len(self._abroad):
                raise OffbeatError(f"no actor can start on this Ray cluster; is Offbeat on every node? {lost}")
        left = [entry for number, entry in enumerate(abroad.share) if number not in abroad.back]
        self._lost.update(left if abroad.is_here else ())
        for entry in reversed(left):
            if self._lost[entry] > LOST_MAX:
                self._fail([entry], f"its actor was lost {self._lost[entry]} times, perhaps for want of memory: {lost}")
            else:
                self._waiting.appendleft([entry])

    def _fail(self, share: Sequence[ComparedRun], why: str) -> None:
        self._failures += [Failure(entry.method, entry.seed, why) for entry in share]
        self._over += len(share)
