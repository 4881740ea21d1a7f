"""Owns `offbeat track`: sends a run, finished or under way, to TensorBoard or MLflow."""

from pathlib import Path

import click

from offbeat.cli.options import FOLDER
from offbeat.cli.waiting import waiting

TRACK = click.option(
    "--track",
    multiple=True,
    metavar="TRACKER",
    help="Also send the run to tensorboard:DIR or mlflow:URI; may be given more than once.",
)


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("trackers", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Go on until the run is finished.")
def track(folder: Path, trackers: tuple[str, ...], live: bool) -> None:
    """Show the run in FOLDER in TRACKERS: tensorboard:DIR, mlflow:URI (such as mlflow:sqlite:///mlflow.db)."""
    from offbeat.trackers.follower import follow, follow_live
    from offbeat.trackers.sink import sink_of

    with waiting("sending to the trackers"):
        sinks = [sink_of(tracker) for tracker in trackers]
        finished = follow_live(folder, sinks) if live else follow(folder, sinks)
    rest = "The trackers have the run so far; the same command sends the rest later."
    click.echo("The trackers have the whole run." if finished else rest, err=True)
