"""Owns the connection to Ray; nothing else imports it.

Rules kept here:
- A Ray that was started or connected to here is left when its last user is done; one that was there before is not.
- Every method of an actor returns (error, answer), as two objects: whether it went well is known without fetching what
  may be large, and an error of the user's comes back as it was.
- Whatever Ray says when an actor, a node or an object is gone is `Lost` here.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import floor
from typing import Any, NamedTuple

from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.hosting.child import CHILD_ENVIRONMENT, cores

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""A Ray that is started here reports to nobody, its actors have the priority of other processes, its parts
have time to start, and the variables that hide GPUs stay as they are."""
OWN = "local"
RUNNING = "auto"
"""What Ray calls a cluster of its own on this machine, and the one that runs there already."""
CONNECT_S = 10.0

_users = 0
_is_ours = False


class Lost(Exception):
    """What was asked for is gone, with its actor or with its node."""


class Call(NamedTuple):
    """A call that an actor was sent: whether it went well, and the answer."""

    error: Any
    answer: Any


class Cluster:
    """A Ray cluster, while it is used."""

    def __init__(self, address: str | None = None) -> None:
        """Without an address: the one that this process uses already, that of RAY_ADDRESS, or one of its own."""
        global _users, _is_ours
        self._ray = installed()
        if not self._ray.is_initialized():
            _start(self._ray, address)
            _is_ours = True
        _users += 1

    def places(self, gpus: float) -> int:
        """How many actors fit, with so much of a GPU each."""
        there = self._ray.cluster_resources()
        found = places_of(there, gpus)
        if not found:
            has = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
            raise OffbeatError(f"no actor fits on this Ray cluster: it has {has}, and each needs 1 and {gpus:g}")
        return found

    def hire(self, kind: type, *arguments: Any, gpus: float = 0.0) -> Any:
        """An actor on whichever node has room, with the environment that processes here get."""
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        environment_ = {"env_vars": CHILD_ENVIRONMENT}
        return self._ray.remote(kind).options(**options, runtime_env=environment_).remote(*arguments)

    def put(self, value: Any) -> Any:
        """Put something where every node finds it, for as long as what is returned is kept."""
        return self._ray.put(value)

    def call(self, actor: Any, verb: str, *arguments: Any) -> Call:
        """Ask an actor; what was `put` arrives as it was before."""
        return Call(*getattr(actor, verb).options(num_returns=2).remote(*arguments))

    def ended(self, calls: Sequence[Call], wait_s: float) -> list[Call]:
        """Those that are over, well or not; waits so long for the first."""
        if not calls:
            return []
        by_error = {call.error: call for call in calls}
        options = {"fetch_local": False}
        if wait_s and not self._ray.wait([*by_error], timeout=wait_s, **options)[0]:
            return []
        over = self._ray.wait([*by_error], num_returns=len(by_error), timeout=0, **options)[0]
        return [by_error[error] for error in over]

    def error(self, call: Call) -> Exception | None:
        """What went wrong in the actor; raises `Lost`."""
        found: Exception | None = self._fetched(call.error)
        return found

    def answer(self, call: Call) -> Any:
        """The answer; raises `Lost`."""
        return self._fetched(call.answer)

    def _fetched(self, reference: Any) -> Any:
        gone = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except gone.RayError as error:
            kinds = (gone.RayActorError, gone.ObjectLostError, gone.NodeDiedError, gone.WorkerCrashedError)
            if isinstance(error, (*kinds, gone.OutOfMemoryError)) or isinstance(getattr(error, "cause", None), kinds):
                raise Lost(_one_line(error)) from error
            raise OffbeatError(f"Ray failed: {_one_line(error)}") from error

    def dismiss(self, actor: Any) -> None:
        """End an actor, whatever it does."""
        self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, unless somebody else here uses it."""
        global _users, _is_ours
        _users -= 1
        if _is_ours and not _users:
            _is_ours = False
            self._ray.shutdown()


def installed() -> Any:
    """Ray, or the line that says how to get it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("ray", "ray") from error
    return ray


def places_of(resources: Mapping[str, float], gpus: float) -> int:
    """Actors that fit, each with a CPU and so much of a GPU; one that needs less than a GPU never has parts of two.

    >>> places_of({"CPU": 8, "GPU": 2}, 0), places_of({"CPU": 8, "GPU": 2}, 0.3), places_of({"CPU": 8, "GPU": 2}, 2)
    (8, 6, 1)
    """
    cpus, there = floor(resources.get("CPU", 0)), floor(resources.get("GPU", 0))
    if not gpus:
        return cpus
    return min(cpus, there * floor(1 / gpus + 1e-9) if gpus <= 1 else floor(there / gpus))


def _start(ray: Any, address: str | None) -> None:
    """Connect; quietly, and with Ctrl-C and SIGTERM left to whoever has them."""
    address = address or os.environ.get("RAY_ADDRESS") or OWN
    if address not in (OWN, RUNNING):
        _refuse_unless_it_answers(address)
    own = {"num_cpus": cores(), "include_dashboard": False} if address == OWN else {}
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        with _signals_kept(), environment(RAY_ENVIRONMENT):
            ray.init(address=address, **own, **quiet)
    except Exception as error:  # Ray raises that very class, too, when a node takes too long to start
        raise OffbeatError(f"cannot connect to Ray at {address}: {_one_line(error)}") from error


def _refuse_unless_it_answers(address: str) -> None:
    """Ray itself would go on trying for minutes."""
    host, _, port = address.rpartition(":")
    if "/" in host or not host or not port.isdecimal():
        raise InvalidValue(
            f"ray_address is {address!r} but must be HOST:PORT or {RUNNING}; start the command on a node of the "
            "cluster, or with `ray job submit`"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise OffbeatError(f"no Ray cluster answers at {address}: {error}; `ray status` there tells more") from error


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray takes SIGTERM for itself when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in their environment."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
