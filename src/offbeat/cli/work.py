"""Owns `offbeat work`: a worker for one device, from the command line to its exit status.

Rules kept here:
- The task is loaded after the worker has joined, with the settings that the server sends.
- Two workers on one machine never share a folder: without --dir each takes the first that is free.
- It ends with 0 when the run is finished or it was told to stop, 1 when trainings fail, 2 when it may not go on.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

if TYPE_CHECKING:
    from offbeat.task import Task
    from offbeat.worker.messages import Joined
    from offbeat.worker.outbox import Outbox
    from offbeat.worker.settings import WorkerSettings

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
HOME = Path(".offbeat-work")
WORKERS_MAX = 1000
"""Workers of one server in one folder of folders."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Failed(click.ClickException):
    """The task does not work here."""

    exit_code = 1


@click.command()
@click.argument("task")
@click.option("--server", required=True, envvar="OFFBEAT_SERVER", help="Where it is: https://HOST:PORT.")
@click.option("--token", help="What `offbeat token` gave.  [env: OFFBEAT_TOKEN]")
@click.option("--token-file", type=FILE, envvar="OFFBEAT_TOKEN_FILE", help="Read the token from a file.")
@click.option("--ca", type=FILE, envvar="OFFBEAT_CA", help="Trust servers with a certificate from this authority.")
@click.option("--insecure", is_flag=True, help="Send the token over http:// to another machine all the same.")
@click.option("--device", type=int, envvar="OFFBEAT_DEVICE", help="Whose data are here.  [default: the server says]")
@click.option("--name", envvar="OFFBEAT_NAME", help="By which the server knows the worker again.  [default: made up]")
@click.option(
    "--dir", "folder", type=FOLDER, help=f"For finished updates.  [default: {HOME}/HOST-PORT-N, the first free N]"
)
@click.option("--only-when", default="", envvar="OFFBEAT_ONLY_WHEN", help="Some of idle, plugged-in, unmetered.")
@click.option("--gate", envvar="OFFBEAT_GATE", help="A command that decides, by its status 0, whether to train now.")
@click.option("--threads", type=int, envvar="OFFBEAT_THREADS", help="Threads of a training.  [default: the library's]")
@click.option("--nice", default=0, show_default=True, envvar="OFFBEAT_NICE", help="Give way to others: 0..19.")
@click.option("--journal", type=FILE, envvar="OFFBEAT_JOURNAL", help="Note every acknowledged update in this file.")
@click.option("--at-least-s", default=0.0, help="A task takes at least this long: to try how slow devices fare.")
@click.option("--failures-max", default=5, show_default=True, help="Failed trainings in a row before it gives up.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def work(task: str, token: str | None, token_file: Path | None, quiet: bool, **flags: Any) -> None:
    """Train TASK for one device, for as long as the server has something to do.

    TASK is digits, cifar10, wikitext2, or path.py[:name].
    """
    from offbeat.errors import OffbeatError
    from offbeat.worker.answers import Refused
    from offbeat.worker.loop import GaveUp
    from offbeat.worker.settings import TOKEN, WorkerSettings, token_of

    settings = WorkerSettings(token=token_of(token, token_file), **flags)
    try:
        _work(task, settings, (lambda _line: None) if quiet else partial(click.echo, err=True))
    except GaveUp as error:
        raise Failed(str(error)) from error
    except Refused as refused:
        if refused.error not in ("no_token", "bad_token"):
            raise
        raise OffbeatError(f"{refused.message}; give it with --token, --token-file or {TOKEN}") from refused


def _work(spec: str, settings: "WorkerSettings", say: Callable[[str], None]) -> None:
    from offbeat.hosting.loading import described, identity
    from offbeat.worker.calls import Calls, Hello, common_headers
    from offbeat.worker.eligibility import Eligibility, conditions_of
    from offbeat.worker.http import Http
    from offbeat.worker.loop import Worker
    from offbeat.worker.outbox import Journal

    eligibility = Eligibility(conditions_of(settings.only_when), settings.gate)
    http = Http(settings.address, common_headers(settings.token), settings.context(), settings.timeouts)
    _give_way(settings)
    with outbox_of(settings) as outbox:
        journal = Journal(settings.journal)
        try:
            Worker(
                Calls(http, Hello(outbox.name(), identity(spec), settings.device)),
                outbox,
                partial(make, spec, say),
                settings,
                eligibility=eligibility,
                journal=journal,
                say=say,
                describe=partial(described, task_spec=spec),
            ).run()
        finally:
            journal.close()


def make(spec: str, say: Callable[[str], None], joined: "Joined") -> "Task":
    """The task as the server's run has it, to train with."""
    from offbeat.hosting.loading import identity, load
    from offbeat.settings import Settings

    if identity(spec) != joined.task:
        say(f"this task is {identity(spec)}, that of the server {joined.task}; going on")
    task = load(spec, Settings.of({**joined.settings, "warm_up": None}))
    warm = getattr(task, "warm_up", None) is not None
    return task.with_settings(warm_up=None) if warm else task  # type: ignore[attr-defined]


def outbox_of(settings: "WorkerSettings") -> "Outbox":
    """The folder of this worker, which no other process has."""
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
    """Before the task is imported: its library looks at this once."""
    if settings.threads is not None:
        os.environ.update(dict.fromkeys(THREADS, str(settings.threads)))
    if settings.nice:
        os.nice(settings.nice)
