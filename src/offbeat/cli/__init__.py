"""Owns the command line: `offbeat COMMAND`.

Rules kept here:
- A mistake of the user's is one line that says what is allowed, exit status 2, no traceback.
- What a command needs is imported when it runs: `offbeat --help` answers at once.
"""

from pathlib import Path
from typing import Any

import click

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
@click.option(
    "--dir",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("runs/demo"),
    show_default=True,
    help="Where the picture goes.",
)
@click.option("--devices", default=100, show_default=True, help="How many devices share the data.")
@click.option("--in-flight-max", default=20, show_default=True, help="How many of them work at a time.")
@click.option("--virtual-s", default=120.0, show_default=True, help="Length of the race on the virtual clock, seconds.")
@click.option("--seed", default=1, show_default=True, help="One seed, one run.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object on the last line.")
def demo(folder: Path, devices: int, in_flight_max: int, virtual_s: float, seed: int, as_json: bool) -> None:
    """Race FedAsync against synchronous averaging on handwritten digits."""
    from offbeat.cli.demo import race

    race(folder, devices=devices, in_flight_max=in_flight_max, virtual_s=virtual_s, seed=seed, as_json=as_json)
