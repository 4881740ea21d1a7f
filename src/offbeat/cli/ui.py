"""Owns `offbeat ui`: pages for the runs in a folder, in a browser on this machine."""

from pathlib import Path
from typing import Any

import click

from offbeat.cli.options import FOLDER
from offbeat.errors import MissingExtra

PORT = 7744


@click.command()
@click.argument("folder", type=FOLDER, default=Path("runs"))
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=PORT,
    show_default=True,
    help="Port to listen on; 0 picks a free one.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; of this machine only.")
def ui(folder: Path, port: int, host: str) -> None:
    """Show the runs under FOLDER in a browser, simulated and served, and compare them; Ctrl-C ends."""
    from offbeat.cli.standing import run_folders

    try:
        from offbeat.web.ui_server import serve
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "web") from error
    serve(folder, run_folders, host=host, port=port, ready=_say)


def _say(server: Any) -> None:
    click.echo(f"Runs are shown at {server.url} (Ctrl-C ends)", err=True)
