"""Owns the command line: `offbeat COMMAND`.

Rules kept here:
- A mistake of the user's is one line that says what is allowed, exit status 2, no traceback.
- What a command needs is imported when it runs: `offbeat --help` answers at once.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import click

from offbeat.cli.backing_up import backup
from offbeat.cli.options import (
    ACCEPT_CHANGED_TASK,
    FILE,
    FOLDER,
    JSON,
    PLACES,
    TRACK,
    GroupedCommand,
    all_of,
    flags_of,
    folder_option,
    settings_options,
)
from offbeat.cli.rule_library import rules
from offbeat.cli.tokens import init, token
from offbeat.cli.viewing import export, pause, readmit, report, resume, runs, status, track, ui, verify
from offbeat.cli.work import work
from offbeat.errors import OffbeatError
from offbeat.server.settings import ServerSettings

SECTIONS = {
    "Try it": ("demo", "race"),
    "Simulate": ("simulate", "compare", "reproduce", "rules"),
    "Serve": ("serve", "work", "init", "token", "pause", "resume", "readmit"),
    "Look at runs": ("runs", "status", "ui", "report", "verify", "export", "backup", "track"),
}
"""All commands, as the help lists them."""


class UserMistake(click.ClickException):
    """Ends the command with one line and exit status 2."""

    exit_code = 2


class Commands(click.Group):
    """Lists commands by subject, and turns every error of Offbeat's own into one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except OffbeatError as error:
            raise UserMistake(str(error)) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = formatter.width - max(map(len, self.commands)) - 6
        for title, names in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(width)) for name in names])


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="offbeat")
def main() -> None:
    """Train one model across many devices that answer whenever they can."""


@main.command()
@folder_option("Folder for the run.", "runs/demo")
@JSON
def demo(**options: Any) -> None:
    """Train with a real server and six real workers.

    They learn handwritten digits on this machine. One worker is killed on the way, and one joins late.
    """
    from offbeat.cli.demo import demo as run

    run(**options)


@main.command()
@folder_option("Folder for the picture.", "runs/race")
@click.option("--devices", default=100, show_default=True, help="Number of devices that share the data.")
@click.option("--in-flight-max", default=20, show_default=True, help="Most tasks in flight at a time.")
@click.option("--virtual-s", default=120.0, show_default=True, help="Length of the race on the virtual clock, seconds.")
@click.option("--seed", default=1, show_default=True, help="The same seed gives the same race.")
@JSON
def race(**options: Any) -> None:
    """Race FedAsync against synchronous averaging.

    Both train handwritten digits on the same simulated devices, for the same time on the virtual clock.
    """
    from offbeat.cli.simulating import race as run

    run(**options)


@main.command(cls=GroupedCommand)
@click.argument("task")
@folder_option("Keep the run in this folder; an interrupted run is resumed, a finished one extended to a later end.")
@ACCEPT_CHANGED_TASK
@TRACK
@JSON
@settings_options
def simulate(**options: Any) -> None:
    """Simulate a task under a virtual clock.

    TASK is digits, cifar10, wikitext2, or path.py[:name].
    """
    from offbeat.cli.simulating import simulate as run

    run(**options)


@main.command(
    cls=GroupedCommand,
    groups={
        **dict.fromkeys(("access", "insecure", *(setting.name for setting in fields(ServerSettings))), "server"),
        "exit_when_finished": "end",
        "evaluation_threads": "evaluation",
    },
)
@click.argument("task")
@folder_option(
    "Folder of the run; one that is there is resumed, or extended to a later end.  [default: runs/serve-TASK]"
)
@click.option("--access", type=FOLDER, help="Folder that `offbeat init` made: turns on TLS and tokens.")
@click.option("--insecure", is_flag=True, help="Allow other machines to connect without TLS and tokens.")
@click.option("--init", "x_0", type=FILE, help="Start a new run from this model (safetensors).")
@click.option("--drop-damaged", is_flag=True, help="Resume without acknowledged updates whose files are damaged.")
@click.option("--accept-loss", is_flag=True, help="Resume although rows of the ledger are missing, and record that.")
@click.option(
    "--exit-when-finished",
    is_flag=True,
    help="Exit after the last epoch instead of serving the result; with status 3 if the run failed.",
)
@click.option("--log-events", metavar="FILE", help="Log every event as a line of JSON; - is standard error.")
@ACCEPT_CHANGED_TASK
@TRACK
@flags_of(ServerSettings)
@settings_options
def serve(**options: Any) -> None:
    """Serve a task to workers.

    TASK is digits, cifar10, wikitext2, or path.py[:name]. An interrupted run is resumed.
    """
    from offbeat.cli.serve import serve as run

    run(**options)


@main.command(cls=GroupedCommand, groups=dict.fromkeys(("on", "processes"), "execution"))
@click.argument("spec", type=FILE)
@folder_option("Folder for the runs.  [default: runs/NAME-OF-SPEC]")
@all_of(*PLACES)
@JSON
def compare(**options: Any) -> None:
    """Compare methods, settings and seeds.

    SPEC is a TOML file that names them; docs/simulation.md describes it. An interrupted comparison is resumed.
    """
    from offbeat.cli.simulating import compare as run

    run(**options)


@main.command(cls=GroupedCommand, groups=dict.fromkeys(("on", "processes"), "execution"))
@click.argument("target")
@click.option(
    "--as",
    "as_",
    type=click.Choice(["text", "authors"]),
    default="text",
    show_default=True,
    help="Follow the paper's text, or its authors' code.",
)
@click.option("--scale", default="laptop", show_default=True, help="Size of the experiment: smoke, laptop or paper.")
@folder_option("Folder for the results.  [default: docs/reproduction, else runs/reproduction]")
@click.option(
    "--work", type=FOLDER, default=Path("runs/reproduce"), show_default=True, help="Folder for unfinished runs."
)
@all_of(*PLACES)
@JSON
def reproduce(**options: Any) -> None:
    """Reproduce a figure of the paper.

    TARGET is cifar-k4, cifar-k16, wikitext-k4, wikitext-k16, staleness or sensitivity; or, beyond the paper, skewed,
    clock or cifar-partial. A curve that has a result with the same settings is not run again.
    """
    from offbeat.cli.reproduce import reproduce as run

    run(**options)


for command in (
    status,
    runs,
    ui,
    report,
    verify,
    export,
    backup,
    track,
    pause,
    resume,
    readmit,
    init,
    token,
    work,
    rules,
):
    main.add_command(command)
