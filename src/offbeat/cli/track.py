"""Owns `offbeat track`: a run, finished or under way, in TensorBoard or MLflow."""

from pathlib import Path

import click

from offbeat.cli.options import FOLDER
from offbeat.cli.progress import spinner

TRACK = click.option(
    "--track",
    multiple=True,
    metavar="TRACKER",
    help="Show the run in tensorboard:DIR or mlflow:URI, too; may be repeated.",
)


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("trackers", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Follow the run until it is finished.")
def track(folder: Path, trackers: tuple[str, ...], live: bool) -> None:
    """Show a run in TensorBoard or MLflow.

    FOLDER is the run's. TRACKERS are tensorboard:DIR or mlflow:URI, such as mlflow:sqlite:///mlflow.db.
    """
    from offbeat.trackers.follower import follow, follow_live
    from offbeat.trackers.sink import sink_of

    with spinner("telling the trackers"):
        sinks = [sink_of(tracker) for tracker in trackers]
        finished = follow_live(folder, sinks) if live else follow(folder, sinks)
    there, rest = (
        "The trackers have the whole run.",
        "The trackers have the run so far; run the same command again later.",
    )
    click.echo(there if finished else rest, err=True)
