"""Owns `offbeat track`: tell TensorBoard or MLflow of a run, finished or under way."""

from pathlib import Path

import click

from offbeat.cli.options import FOLDER
from offbeat.cli.progress import spinner

TRACK = click.option(
    "--track", multiple=True, metavar="TRACKER", help="Also show it in tensorboard:DIR or mlflow:URI; more than once."
)


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("trackers", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Go on until the run is finished.")
def track(folder: Path, trackers: tuple[str, ...], live: bool) -> None:
    """Show the run in FOLDER in TRACKERS: tensorboard:DIR, mlflow:URI (such as mlflow:sqlite:///mlflow.db)."""
    from offbeat.trackers.follower import follow, follow_live
    from offbeat.trackers.sink import sink_of

    with spinner("telling the trackers"):
        sinks = [sink_of(tracker) for tracker in trackers]
        finished = follow_live(folder, sinks) if live else follow(folder, sinks)
    click.echo("All of it." if finished else "As far as it has come; the same command tells the rest later.", err=True)
