"""Owns `offbeat work`: a worker for one device, from the command line to its exit status.

Rules kept here:
- The task is loaded after the worker has joined, with the settings that the server sends.
- Two workers on one machine never share a folder: without --dir each takes the first that is free.
- The exit status is 0 when the run is finished or the worker was told to stop, 1 when trainings fail, 4 when the server
  could not be reached for --give-up-after, 2 on any other error.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from offbeat.cli.options import FILE, TASK_ARGS, GroupedCommand, folder_option

if TYPE_CHECKING:
    from offbeat.task import Task
    from offbeat.worker.api_answers import Joined
    from offbeat.worker.outbox import Outbox
    from offbeat.worker.settings import WorkerSettings

HOME = Path(".offbeat-work")
WORKERS_MAX = 1000
"""Workers of one server in one folder of folders."""
GROUPS = {
    **dict.fromkeys(("server", "token", "token_file", "ca", "insecure"), "server"),
    **dict.fromkeys(("device", "name", "only_when", "gate", "threads", "nice", "at_least_s"), "Device"),
}
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class ServerUnreached(click.ClickException):
    """The server was waited for as long as the user said."""

    exit_code = 4


class WorkFailed(click.ClickException):
    """Trainings of the task fail on this device."""

    exit_code = 1


@click.command(cls=GroupedCommand, groups=GROUPS)
@click.argument("task")
@click.option("--server", required=True, envvar="OFFBEAT_SERVER", help="URL of the server: https://HOST:PORT.")
@click.option("--token", help="Token that `offbeat token` made.  [env: OFFBEAT_TOKEN]")
@click.option("--token-file", type=FILE, envvar="OFFBEAT_TOKEN_FILE", help="File to read the token from.")
@click.option("--ca", type=FILE, envvar="OFFBEAT_CA", help="Trust servers with a certificate from this authority.")
@click.option("--insecure", is_flag=True, help="Allow the token to be sent over http:// to another machine.")
@click.option(
    "--device",
    type=int,
    envvar="OFFBEAT_DEVICE",
    help="Number of the device whose data are here.  [default: the server chooses]",
)
@click.option(
    "--name", envvar="OFFBEAT_NAME", help="Name by which the server recognises this worker.  [default: generated]"
)
@folder_option(f"Folder for finished updates.  [default: {HOME}/HOST-PORT-N, the first free N]")
@click.option(
    "--only-when",
    default="",
    envvar="OFFBEAT_ONLY_WHEN",
    help="Train only under these conditions: idle, plugged-in, unmetered; several with commas between them.",
)
@click.option("--gate", envvar="OFFBEAT_GATE", help="Train only when this command exits with status 0.")
@click.option("--threads", type=int, envvar="OFFBEAT_THREADS", help="Threads per training.  [default: the library's]")
@click.option("--nice", default=0, show_default=True, envvar="OFFBEAT_NICE", help="Lower the priority: 0..19.")
@click.option("--journal", type=FILE, envvar="OFFBEAT_JOURNAL", help="Write every acknowledged update to this file.")
@click.option("--at-least-s", default=0.0, help="Make every task take at least this many seconds, like a slow device.")
@click.option(
    "--give-up-after",
    type=float,
    metavar="S",
    envvar="OFFBEAT_GIVE_UP_AFTER",
    help="End with status 4 when the server could not be reached for this many seconds.  [default: never]",
)
@click.option("--failures-max", default=5, show_default=True, help="Give up after this many failed trainings in a row.")
@TASK_ARGS
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def work(
    task: str, token: str | None, token_file: Path | None, task_args: dict[str, Any] | None, quiet: bool, **flags: Any
) -> None:
    """Train a task for one device.

    The worker runs until the server has nothing more to do. TASK is digits, cifar10, wikitext2, or path.py[:name].
    """
    from offbeat.errors import OffbeatError
    from offbeat.worker.api_answers import RequestRefused
    from offbeat.worker.loop import GaveUp
    from offbeat.worker.retrying import ServerLost
    from offbeat.worker.settings import TOKEN, WorkerSettings, token_of

    settings = WorkerSettings(token=token_of(token, token_file), **flags)
    try:
        _work(task, settings, (lambda _line: None) if quiet else partial(click.echo, err=True), task_args or {})
    except GaveUp as error:
        raise WorkFailed(str(error)) from error
    except ServerLost as error:
        raise ServerUnreached(str(error)) from error
    except RequestRefused as refused:
        if refused.error not in ("no_token", "bad_token"):
            raise
        raise OffbeatError(f"{refused.message}; give it with --token, --token-file or {TOKEN}") from refused


def _work(spec: str, settings: "WorkerSettings", say: Callable[[str], None], task_args: Mapping[str, Any]) -> None:
    from offbeat.hosting.loading import described
    from offbeat.hosting.task_identity import identity
    from offbeat.worker.api_client import ApiClient, Hello, common_headers
    from offbeat.worker.eligibility import Eligibility, conditions_of
    from offbeat.worker.http_client import HttpClient
    from offbeat.worker.journal import Journal
    from offbeat.worker.loop import Worker

    eligibility = Eligibility(conditions_of(settings.only_when), settings.gate)
    http = HttpClient(settings.address, common_headers(settings.token), settings.context(), settings.timeouts)
    _give_way(settings)
    with outbox_of(settings) as outbox, closing(Journal(settings.journal)) as journal:
        Worker(
            ApiClient(http, Hello(outbox.name, identity(spec), settings.device)),
            outbox,
            partial(make, spec, say, task_args=task_args),
            settings,
            eligibility=eligibility,
            journal=journal,
            say=say,
            describe=partial(described, task_spec=spec),
        ).run()


def make(spec: str, say: Callable[[str], None], joined: "Joined", task_args: Mapping[str, Any] | None = None) -> "Task":
    """The task as the server's run has it, to train with; arguments that are given here win over the server's."""
    from offbeat.hosting.loading import load
    from offbeat.hosting.task_identity import identities
    from offbeat.settings import Settings

    known_as = identities(spec)
    if joined.task not in known_as:
        say(f"this task is {known_as[0]}, that of the server {joined.task}; going on")
    arguments = {**(joined.settings.get("task_args") or {}), **(task_args or {})}
    task = load(spec, Settings.of({**joined.settings, "warm_up": None, "task_args": arguments}))
    warm = getattr(task, "warm_up", None) is not None
    return task.with_settings(warm_up=None) if warm else task  # type: ignore[attr-defined]


def outbox_of(settings: "WorkerSettings") -> "Outbox":
    """The folder of this worker, locked against other processes."""
    from offbeat.errors import InvalidValue
    from offbeat.storage.lock import is_held
    from offbeat.worker.outbox import LOCK, Outbox

    place = f"{settings.address.host.replace(':', '_')}-{settings.address.port}"
    if settings.folder is not None:
        return Outbox(settings.folder, name=settings.name)
    if settings.name is not None:
        return Outbox(HOME / f"{place}-{quote(settings.name, safe='')}", name=settings.name)
    if settings.device is not None:
        return Outbox(HOME / f"{place}-device-{settings.device}")
    for number in range(WORKERS_MAX):
        try:
            return Outbox(HOME / f"{place}-{number}")
        except InvalidValue:
            if not is_held(HOME / f"{place}-{number}" / LOCK):
                raise
    raise InvalidValue(f"{WORKERS_MAX} workers have their folders in {HOME}; give this one its own with --dir")


def _give_way(settings: "WorkerSettings") -> None:
    """Must come before the task is imported: its library reads the environment only then."""
    if settings.threads is not None:
        os.environ.update(dict.fromkeys(THREADS, str(settings.threads)))
    if settings.nice:
        os.nice(settings.nice)
