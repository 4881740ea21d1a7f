"""Owns the runs of a comparison on a Ray cluster: shares go out to actors, finished runs come back.

Rules kept here:
- The folder of a run is here when the run is finished, or when the comparison is stopped; nodes need no disk in common.
- Runs that a lost node had not finished are begun again elsewhere, from the files that are here. Each goes out alone:
  a run that takes its actor down takes no other run with it.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.sim.lockstep import Failure, Tell
from offbeat.sim.on_ray.cluster import Cluster, RemoteCall, RemoteCallLost
from offbeat.sim.on_ray.folders import arrived, packed_folder
from offbeat.sim.on_ray.on_node import packages, refuse_other_packages
from offbeat.sim.on_ray.share_actor import ShareActor, ShareNews
from offbeat.sim.on_ray.task_files import TaskFiles
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import ComparedRun
from offbeat.storage.run_folder import SUMMARY

LOST_MAX = 3
"""How many actors may be lost with one run."""
FALSE_STARTS_MAX = 5
"""How many actors in a row may be lost before they answer, beside one for each share."""
SILENCE_MAX_S = 300.0
"""How long the cluster may tell nothing."""
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
    connect: Callable[[str | None], Cluster] = Cluster,
) -> list[Failure]:
    """Run these in `count` shares, else in one per CPU, and return the failures."""
    cluster = connect(address)
    try:
        count = count or cluster.places(0.0)
        shares = RemoteShares(cluster, TaskFiles.of(task_spec), pictures=pictures)
        try:
            return shares.run([share for number in range(count) if (share := [*entries[number::count]])], tell)
        finally:
            shares.close()
    finally:
        cluster.close()


@dataclass(eq=False, slots=True)
class RemoteShare:
    """A share that an actor runs, and the call that will be over next."""

    actor: Any
    runs: list[ComparedRun]
    call: RemoteCall
    is_here: bool = False
    far: float = 0.0
    back: set[int] = field(default_factory=set)
    """Runs that came back, by their number in the share."""


class RemoteShares:
    """All shares, those that wait for an actor and those that have one."""

    def __init__(self, cluster: Cluster, task: TaskFiles, *, pictures: bool) -> None:
        self._cluster, self._task, self._pictures = cluster, task, pictures
        self._waiting: deque[list[ComparedRun]] = deque()
        self._running: list[RemoteShare] = []
        self._failures: list[Failure] = []
        self._lost: Counter[ComparedRun] = Counter()
        self._over, self._false_starts, self._heard = 0, 0, monotonic()

    def run(self, shares: Sequence[list[ComparedRun]], tell: Tell) -> list[Failure]:
        """Run all to their ends; `tell` hears how many runs are done, and may raise `StopRequested`."""
        self._waiting.extend(shares)
        try:
            while self._waiting or self._running:
                while self._waiting and len(self._running) < len(shares):
                    self._begin(self._waiting.popleft())
                self._listen()
                tell(self._over + sum(max(share.far - len(share.back), 0.0) for share in self._running))
        except StopRequested:
            self._stop()
            raise
        return self._failures

    def close(self) -> None:
        for share in self._running:
            self._cluster.end_actor(share.actor)

    def _begin(self, runs: list[ComparedRun]) -> None:
        try:
            begun = [packed_folder(entry.folder) for entry in runs]
        except (InvalidValue, OSError) as error:
            self._fail(runs, str(error))
            return
        actor = self._cluster.actor(ShareActor, self._task, runs, begun, self._pictures, str(Path.cwd()))
        self._running.append(RemoteShare(actor, runs, self._cluster.call(self._cluster.method(actor, "hello"))))

    def _stop(self) -> None:
        """Shares that have begun send back their runs; the others have nothing to send."""
        self._waiting.clear()
        for share in self._running:
            if not share.is_here:
                self._cluster.end_actor(share.actor)
        self._running = [share for share in self._running if share.is_here]
        for share in self._running:
            self._cluster.call(self._cluster.method(share.actor, "stop"))
        while self._running:
            self._listen()
            self._waiting.clear()  # nothing of a share that is lost now is begun again

    # --- news --------------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        speaking = {share.call: share for share in self._running}
        for call in self._cluster.ended([*speaking], LISTEN_S):
            try:
                self._hear(speaking[call])
                self._heard = monotonic()
            except RemoteCallLost as lost:
                self._redo(speaking[call], lost)
        if self._running and monotonic() - self._heard > SILENCE_MAX_S:
            raise OffbeatError(f"the Ray cluster told nothing for {SILENCE_MAX_S:.0f} s; is it busy with other work?")

    def _hear(self, share: RemoteShare) -> None:
        answer = self._cluster.answer(share.call)
        if not share.is_here:
            refuse_other_packages(answer, packages())
            share.is_here, self._false_starts = True, 0
        elif self._take(share, answer):
            return
        share.call = self._cluster.call(self._cluster.method(share.actor, "news"))

    def _take(self, share: RemoteShare, news: ShareNews) -> bool:
        """True where these were the last news of the share."""
        share.far = news.far
        if news.number is not None:
            arrived(news.files, share.runs[news.number].folder)
            if SUMMARY in news.files:
                share.back.add(news.number)
                self._over += 1
        if news.failures is None:
            return False
        self._failures += news.failures
        self._over += len(news.failures)
        self._end(share)
        return True

    def _end(self, share: RemoteShare) -> None:
        self._running.remove(share)
        self._cluster.end_actor(share.actor)

    def _redo(self, share: RemoteShare, lost: RemoteCallLost) -> None:
        """Runs that have not come back wait again, each alone, before all others."""
        self._end(share)
        if not share.is_here:
            self._false_starts += 1
            if self._false_starts > FALSE_STARTS_MAX + len(self._running):
                raise OffbeatError(f"no actor can start on this Ray cluster; is Offbeat on every node? {lost}")
        left = [entry for number, entry in enumerate(share.runs) if number not in share.back]
        self._lost.update(left if share.is_here else ())
        for entry in reversed(left):
            if self._lost[entry] > LOST_MAX:
                self._fail([entry], f"its actor was lost {self._lost[entry]} times, perhaps for want of memory: {lost}")
            else:
                self._waiting.appendleft([entry])

    def _fail(self, runs: Sequence[ComparedRun], why: str) -> None:
        self._failures += [Failure(entry.method, entry.seed, why) for entry in runs]
        self._over += len(runs)
