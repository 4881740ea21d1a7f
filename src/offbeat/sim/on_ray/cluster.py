"""Owns the connection to Ray; no other module imports it.

Rules kept here:
- A Ray that was started or connected to here is left when its last user closes it. One that was there before stays.
- Every remote call returns (error, answer), as two objects. The error is small and tells at once that the call is over
  or lost. The answer may be large and stays on its node until it is fetched. An error of the task's own code comes back
  as it was.
- Every error of Ray that means that a process, a node or an object is gone becomes `RemoteCallLost`. Ray retries and
  restarts nothing: the caller decides.
"""

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""For a Ray that is started here: it reports to nobody, its processes have ordinary priority, its parts have time to
start, and the variables that hide GPUs stay as they are."""
OWN = "local"
RUNNING = "auto"
"""Ray's words for a cluster of its own on this machine, and for the one that runs there already."""
CONNECT_S = 10.0

_users = 0
_is_ours = False


class RemoteCallLost(Exception):
    """A remote call or its answer is gone, with its process or with its node."""


class RemoteCall(NamedTuple):
    """References to the two objects that a remote call returns."""

    error: Any
    answer: Any


class Cluster:
    """A connection to a Ray cluster."""

    def __init__(self, address: str | None = None) -> None:
        """Without an address: the one that this process uses already, that of RAY_ADDRESS, or one of its own."""
        global _users, _is_ours
        self._ray = installed()
        if not self._ray.is_initialized():
            _start(self._ray, address)
            _is_ours = True
        _users += 1

    def resources(self) -> Mapping[str, float]:
        """What the nodes of the cluster have, all together, whether it is in use or not."""
        found: Mapping[str, float] = self._ray.cluster_resources()
        return found

    def places(self, gpus: float) -> int:
        """How many processes fit, with a CPU and this share of a GPU each; a cluster where none fits is refused."""
        there = self.resources()
        found = places_of(there, gpus)
        if not found:
            has = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
            raise OffbeatError(
                f"nothing fits on this Ray cluster: it has {has}, and each training needs 1 and {gpus:g}"
            )
        return found

    def function(self, do: Callable[..., Any], gpus: float = 0.0) -> Any:
        """A function that any node runs, in a process that is kept for the next call."""
        environment = {"env_vars": CHILD_ENVIRONMENT}
        # without max_calls=0, Ray would end a process with a GPU after every call
        options = {"num_cpus": 1, "num_gpus": gpus, "max_retries": 0, "max_calls": 0}
        return self._ray.remote(**options, num_returns=2, runtime_env=environment)(do)

    def actor(self, kind: type, *arguments: Any) -> Any:
        options = {"num_cpus": 1, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        environment = {"env_vars": CHILD_ENVIRONMENT}
        return self._ray.remote(kind).options(**options, runtime_env=environment).remote(*arguments)

    def method(self, actor: Any, name: str) -> Any:
        return getattr(actor, name).options(num_returns=2)

    def put(self, value: Any) -> Any:
        """Put a value into the object store; it stays there as long as the reference is kept."""
        return self._ray.put(value)

    def call(self, remote: Any, *arguments: Any) -> RemoteCall:
        """Call a function, or a method of an actor; a reference arrives there as the value that was put."""
        return RemoteCall(*remote.remote(*arguments))

    def ended(self, calls: Sequence[RemoteCall], wait_s: float) -> list[RemoteCall]:
        """The calls that are over, well or not; waits at most this long for the first."""
        if not calls:
            return []
        by_error = {call.error: call for call in calls}
        options = {"fetch_local": False}
        if wait_s and not self._ray.wait([*by_error], timeout=wait_s, **options)[0]:
            return []
        over = self._ray.wait([*by_error], num_returns=len(by_error), timeout=0, **options)[0]
        return [by_error[error] for error in over]

    def error(self, call: RemoteCall) -> Exception | None:
        """The error of a call that is over, None where it went well; raises `RemoteCallLost`."""
        found: Exception | None = self._fetched(call.error)
        return found

    def answer(self, call: RemoteCall) -> Any:
        """The answer of a call that went well; raises `RemoteCallLost`."""
        return self._fetched(call.answer)

    def _fetched(self, reference: Any) -> Any:
        gone = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except gone.RayError as error:
            kinds = (gone.RayActorError, gone.ObjectLostError, gone.NodeDiedError, gone.WorkerCrashedError)
            if isinstance(error, (*kinds, gone.OutOfMemoryError)) or isinstance(getattr(error, "cause", None), kinds):
                raise RemoteCallLost(_one_line(error)) from error
            raise OffbeatError(f"Ray failed; is Offbeat installed on every node? {_one_line(error)}") from error

    def cancel(self, call: RemoteCall) -> None:
        """Stop a call of a function, with the process that runs it."""
        self._ray.cancel(call.error, force=True)

    def end_actor(self, actor: Any) -> None:
        """End an actor, even in the middle of a call."""
        self._ray.kill(actor)

    def close(self) -> None:
        """Leave the cluster, unless something else in this process uses it."""
        global _users, _is_ours
        _users -= 1
        if _is_ours and not _users:
            _is_ours = False
            self._ray.shutdown()


def installed() -> Any:
    """The package `ray`; where it is missing, an error that says how to install it."""
    try:
        import ray
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtra("ray", "ray") from error
    return ray


def places_of(resources: Mapping[str, float], gpus: float) -> int:
    """Processes that fit, each with a CPU and this share of a GPU; a share of one GPU is never made of parts of two.

    >>> places_of({"CPU": 8, "GPU": 2}, 0), places_of({"CPU": 8, "GPU": 2}, 0.3), places_of({"CPU": 8, "GPU": 2}, 2)
    (8, 6, 1)
    """
    cpus, there = floor(resources.get("CPU", 0)), floor(resources.get("GPU", 0))
    if not gpus:
        return cpus
    return min(cpus, there * floor(1 / gpus + 1e-9) if gpus <= 1 else floor(there / gpus))


def _start(ray: Any, address: str | None) -> None:
    """Connect without output, and leave the handlers of Ctrl-C and SIGTERM as they are."""
    address = address or os.environ.get("RAY_ADDRESS") or OWN
    if address not in (OWN, RUNNING):
        _refuse_unless_it_answers(address)
    own = {"num_cpus": cores(), "include_dashboard": False} if address == OWN else {}
    quiet = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    try:
        with _signals_kept(), _environment(RAY_ENVIRONMENT):
            ray.init(address=address, **own, **quiet)
    except Exception as error:  # Ray raises that very class, too, when a node takes too long to start
        raise OffbeatError(f"cannot connect to Ray at {address}: {_one_line(error)}") from error


def _refuse_unless_it_answers(address: str) -> None:
    """Without this, Ray would try to connect for minutes."""
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
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """The environment that processes find which are started meanwhile."""
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


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Ray sets a handler of its own for SIGTERM when it starts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
