"""Owns the command line: `offbeat COMMAND`.

Rules kept here:
- A mistake of the user's is one line that says what is allowed, exit status 2, no traceback.
- What a command needs is imported when it runs: `offbeat --help` answers at once.
"""

from pathlib import Path
from typing import Any

import click

from offbeat.cli.access import init, token
from offbeat.cli.bench import bench
from offbeat.cli.look import export, readmit, runs, status, verify
from offbeat.cli.options import FILE, FOLDER, JSON, flags_of, place_options, settings_of, settings_options
from offbeat.cli.report import report
from offbeat.cli.track import TRACK, track
from offbeat.cli.ui import ui
from offbeat.cli.work import work
from offbeat.errors import OffbeatError


class Refused(click.ClickException):
    """A mistake of the user's."""

    exit_code = 2


class Commands(click.Group):
    """Turns every error of Offbeat's own into one line and exit status 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffbeatError as error:
            raise Refused(str(error)) from error


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="offbeat")
def main() -> None:
    """Trains one model across many devices that answer whenever they can."""


@main.command()
@click.option("--dir", "folder", type=FOLDER, default=Path("runs/demo"), show_default=True, help="For the run.")
@JSON
def demo(folder: Path, as_json: bool) -> None:
    """Train handwritten digits with a real server and six real workers, one of them killed on the way."""
    from offbeat.cli.demo import demo as run

    run(folder, as_json=as_json)


@main.command()
@click.option("--dir", "folder", type=FOLDER, default=Path("runs/race"), show_default=True, help="For the picture.")
@click.option("--devices", default=100, show_default=True, help="How many devices share the data.")
@click.option("--in-flight-max", default=20, show_default=True, help="How many of them work at a time.")
@click.option("--virtual-s", default=120.0, show_default=True, help="Length of the race on the virtual clock, seconds.")
@click.option("--seed", default=1, show_default=True, help="One seed, one run.")
@JSON
def race(folder: Path, devices: int, in_flight_max: int, virtual_s: float, seed: int, as_json: bool) -> None:
    """Race FedAsync against synchronous averaging on handwritten digits."""
    from offbeat.cli.race import race as run

    run(folder, devices=devices, in_flight_max=in_flight_max, virtual_s=virtual_s, seed=seed, as_json=as_json)


@main.command()
@click.argument("task")
@click.option("--dir", "folder", type=FOLDER, help="Keep the run here; an interrupted one goes on.")
@TRACK
@JSON
@settings_options
def simulate(
    task: str, folder: Path | None, track: tuple[str, ...], as_json: bool, settings_file: Path | None, **flags: Any
) -> None:
    """Simulate TASK under a virtual clock: digits, cifar10, wikitext2, or path.py[:name]."""
    from offbeat.cli.simulate import simulate as run

    run(task, settings_of(settings_file, flags), folder, as_json=as_json, track=track)


def _server_flags(command: Any) -> Any:
    """The flags of the server's own settings, which are light to import."""
    from offbeat.server.settings import ServerSettings

    return flags_of(ServerSettings)(command)


@main.command()
@click.argument("task")
@click.option("--dir", "folder", type=FOLDER, help="Of the run; one that is there goes on.  [default: runs/serve-TASK]")
@click.option("--access", type=FOLDER, help="Certificates and tokens, as `offbeat init` made them: TLS is on.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without TLS and tokens.")
@click.option("--init", "x_0", type=FILE, help="Start a new run from this model (safetensors).")
@click.option("--drop-damaged", is_flag=True, help="Go on without acknowledged updates whose files are damaged.")
@click.option("--exit-when-finished", is_flag=True, help="End after the last epoch instead of going on answering.")
@click.option("--log-events", metavar="FILE", help="Log every event as a line of JSON; - is standard error.")
@TRACK
@_server_flags
@settings_options
def serve(
    task: str,
    folder: Path | None,
    access: Path | None,
    insecure: bool,
    x_0: Path | None,
    drop_damaged: bool,
    exit_when_finished: bool,
    log_events: str | None,
    track: tuple[str, ...],
    settings_file: Path | None,
    **flags: Any,
) -> None:
    """Serve TASK to workers: digits, cifar10, wikitext2, or path.py[:name]; an interrupted run goes on."""
    from offbeat.cli.serve import serve as run

    run(
        task,
        folder,
        settings_file,
        flags,
        access=access,
        insecure=insecure,
        x_0=x_0,
        drop_damaged=drop_damaged,
        exit_when_finished=exit_when_finished,
        log_events=log_events,
        track=track,
    )


@main.command()
@click.argument("spec", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dir", "folder", type=FOLDER, help="Where the runs go.  [default: runs/NAME-OF-SPEC]")
@place_options
@JSON
def compare(spec: Path, folder: Path | None, as_json: bool, **place: Any) -> None:
    """Compare methods, settings and seeds as SPEC (a TOML file) says; goes on where it was interrupted."""
    from offbeat.cli.compare import compare as run
    from offbeat.sim.backends import Backend

    run(spec, folder or Path("runs") / spec.stem, place=Backend(**place), as_json=as_json)


@main.command()
@click.argument("target")
@click.option(
    "--as", "as_", type=click.Choice(["text", "authors"]), default="text", show_default=True, help="Whose way."
)
@click.option("--scale", default="laptop", show_default=True, help="smoke, laptop or paper.")
@click.option(
    "--dir", "folder", type=FOLDER, help="For the results.  [default: docs/reproduction, else runs/reproduction]"
)
@click.option("--work", type=FOLDER, default=Path("runs/reproduce"), show_default=True, help="For unfinished runs.")
@place_options
@JSON
def reproduce(target: str, as_: Any, scale: str, folder: Path | None, work: Path, as_json: bool, **place: Any) -> None:
    """Reproduce a figure of the paper.

    TARGET is cifar-k4, cifar-k16, wikitext-k4, wikitext-k16, staleness or sensitivity; or, which the paper does not
    have, skewed, clock or cifar-partial. What has a result with the same settings is not run again.
    """
    from offbeat.cli.reproduce import reproduce as run
    from offbeat.sim.backends import Backend

    run(target, scale=scale, as_=as_, folder=folder, work=work, place=Backend(**place), as_json=as_json)


for command in (bench, status, runs, ui, report, verify, export, track, readmit, init, token, work):
    main.add_command(command)
