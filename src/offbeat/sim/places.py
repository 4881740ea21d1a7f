"""Owns where the runs of a comparison go: over the processes of this machine, or to a Ray cluster.

Rule kept here: where a run goes changes nothing about it, so what is found in its folder does not tell.
"""

from collections.abc import Sequence
from typing import NamedTuple

from offbeat.errors import InvalidValue
from offbeat.sim.children import run_shares
from offbeat.sim.on_ray.cluster import installed
from offbeat.sim.on_ray.shares import run_on_ray
from offbeat.sim.processes import PROCESSES_MAX, cores
from offbeat.sim.share import Failure, Tell, run_share
from offbeat.sim.spec import Entry

HERE, RAY = "here", "ray"


class Place(NamedTuple):
    """Where runs go."""

    on: str = HERE
    processes: int | None = None
    """How many shares there are; one per core or, on Ray, per CPU of the cluster, where it is not said."""
    ray_address: str | None = None

    def check(self, entries: Sequence[Entry]) -> None:
        """Refuse what makes no sense, before anything is begun."""
        if self.on not in (HERE, RAY):
            raise InvalidValue(f"on is {self.on!r} but must be {HERE} or {RAY}")
        if self.processes is not None and not 1 <= self.processes <= PROCESSES_MAX:
            raise InvalidValue(
                f"processes is {self.processes} but must lie in 1..{PROCESSES_MAX}; one per core is enough"
            )
        if self.ray_address is not None and self.on != RAY:
            raise InvalidValue("ray_address is set, but the runs stay here; say --on ray, too")
        if self.on == RAY:
            installed()
            for entry in entries:
                if entry.settings.executor.startswith(RAY):
                    raise InvalidValue(
                        f"method {entry.method!r}: executor is {entry.settings.executor}, and the whole run goes to "
                        "Ray already; leave out the executor, or --on ray"
                    )

    def run(self, task_spec: str, entries: Sequence[Entry], tell: Tell, *, pictures: bool = False) -> list[Failure]:
        """Run these and return what failed; `tell` hears how many are done, and may raise `Stop`."""
        if not entries:
            return []
        if self.on == RAY:
            return run_on_ray(
                task_spec, entries, tell, pictures=pictures, address=self.ray_address, count=self.processes
            )
        count = self.processes or cores()
        shares = [share for number in range(count) if (share := entries[number::count])]
        if len(shares) == 1:
            return run_share(task_spec, entries, tell, pictures=pictures)
        return run_shares(task_spec, shares, tell, pictures=pictures)
