"""Owns the settings of the server itself; they may change from one start to the next, unlike those of the run.

Every limit has its name here: queues, bodies, connections, waits.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue
from offbeat.server.host_names import LOOPBACK, names_in
from offbeat.settings import QUEUE_MAX, room_for

RATE_MAX = 1 << 30


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class ServerSettings:
    host: str = _setting("127.0.0.1", "Address to listen on; beyond this machine only with --access or --insecure.")
    port: int = _setting(7733, "Port to listen on; 0 picks a free one, see server.json.")
    behind_proxy: bool = _setting(False, "A proxy on this machine forwards the requests and says where they come from.")
    public_name: str = _setting("", "Names that clients know this server by, separated by commas; others are refused.")
    poll_s: float = _setting(25.0, "Seconds that a request for a task may wait for one.")
    workers_max: int = _setting(100_000, "Most workers that may join.")
    connections_max: int = _setting(20_000, "Most connections at a time.")
    connections_share: float = _setting(0.5, "Largest part of the connections that one token or address may have.")
    uploads_max: int | None = _setting(
        None,
        "Most uploads at a time; further workers are told to come back. "
        f"[default: {QUEUE_MAX}, or in_flight_max, if that is more]",
    )
    uploads_share: float = _setting(0.25, "Part of the uploads that one token or address keeps when others want to.")
    upload_rate_min: int = _setting(1024, "Bytes per second below which an upload is cut; the worker can resume it.")
    listeners_max: int = _setting(256, "Most listeners to events at a time, those of the page included.")
    listeners_share: float = _setting(0.0625, "Largest part of the listeners that one token or address may have.")
    updates_bytes_max: int = _setting(20 << 30, "Most bytes of updates on the disk, including uploads under way.")
    versions_bytes_max: int = _setting(1 << 30, "Most bytes of versions in memory; two versions are always kept.")
    head_s: float = _setting(20.0, "Seconds for the head of a request to come, and for a small body.")
    keep_alive_s: float = _setting(75.0, "Seconds that a connection may be idle between two requests.")
    stall_s: float = _setting(60.0, "Cut an upload after this many seconds without data; the worker can resume it.")
    goodbye_s: float = _setting(
        10.0, "With --exit-when-finished: seconds that workers have to hear that the run is finished."
    )
    checkpoint_every: int = _setting(100, "Versions between two checkpoints.")
    keep_updates: str = _setting("needed", "Updates that stay on the disk: needed (for a restart) or all.")
    updater_threads: int = _setting(1, "Threads that mix; more than one helps from about ten million parameters on.")
    samples_max: int | None = _setting(None, "Most samples that a worker may claim to hold. [default: no limit]")
    gradients_max: int | None = _setting(
        None, "Most gradients that an update may claim, in place of what the task says. [default: what the task says]"
    )
    evaluation_threads: int = _setting(1, "Threads of the process that evaluates.")

    def __post_init__(self) -> None:
        at_least_1 = ("workers_max", "connections_max", "uploads_max", "listeners_max", "checkpoint_every")
        for name in (*at_least_1, "updates_bytes_max", "versions_bytes_max", "updater_threads", "evaluation_threads"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidValue(f"{name} is {getattr(self, name)} but must be a whole number >= 1")
        self._check_fair()
        self._check_claims()
        self._check_names()
        for name in ("poll_s", "head_s", "keep_alive_s", "stall_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise InvalidValue(f"{name} is {getattr(self, name)} but must lie in (0, 3600] seconds")
        if not 0 <= self.goodbye_s <= 3600:
            raise InvalidValue(f"goodbye_s is {self.goodbye_s} but must lie in [0, 3600] seconds")
        if not 0 <= self.port < 1 << 16:
            raise InvalidValue(f"port is {self.port} but must lie in 0..65535; 0 picks a free one")
        if self.keep_updates not in ("needed", "all"):
            raise InvalidValue(f"keep_updates is {self.keep_updates!r}; use needed or all")

    def _check_fair(self) -> None:
        """The limits that keep one client from using up what all share."""
        if not 0 <= self.upload_rate_min <= RATE_MAX:
            raise InvalidValue(
                f"upload_rate_min is {self.upload_rate_min} but must lie in 0..{RATE_MAX} bytes per second"
            )
        for name in ("connections_share", "uploads_share", "listeners_share"):
            if not 0 < getattr(self, name) <= 1:
                raise InvalidValue(f"{name} is {getattr(self, name)} but must lie in (0, 1]; 1 is no limit of its own")

    def _check_claims(self) -> None:
        for name in ("samples_max", "gradients_max"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"{name} is {value} but must be a whole number >= 1; leave it out for no limit")

    def _check_names(self) -> None:
        if not isinstance(self.behind_proxy, bool):
            raise InvalidValue(f"behind_proxy is {self.behind_proxy!r}; use true or false")
        if not isinstance(self.public_name, str):
            raise InvalidValue(f"public_name is {self.public_name!r}; write the names as one text, with commas")
        names_in(self.public_name)  # refused here where one of them is none

    def uploads_at_once(self, in_flight_max: int) -> int:
        """`uploads_max`, or what suits so many tasks in flight."""
        return room_for(in_flight_max) if self.uploads_max is None else self.uploads_max

    @property
    def public_names(self) -> tuple[str, ...]:
        return names_in(self.public_name)

    @property
    def private(self) -> bool:
        """Can no request come from another machine, not even through a proxy?"""
        return self.host in LOOPBACK and not self.behind_proxy


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Who may connect, and over what; `offbeat init` makes the folder."""

    folder: Path | None = None
    """The folder with certificates and tokens; without it everybody who can connect may do everything."""
    insecure: bool = False

    def check(self, settings: ServerSettings) -> None:
        """Refuse to be open to a network by accident."""
        if self.folder is not None or self.insecure or settings.private:
            return
        why = f"host {settings.host} can be reached from other machines"
        if settings.behind_proxy:
            why = "behind_proxy opens this server to everybody who reaches the proxy"
        raise InvalidValue(
            f"{why}: run `offbeat init DIR` once and give --access DIR for TLS and tokens, "
            "or say --insecure if the network itself is safe"
        )
