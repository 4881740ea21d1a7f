"""Owns the commands that look at runs: runs, status, ui, report, verify, export, track; and readmit, which steps in.

What each needs is imported when it runs.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from offbeat.cli.options import FILE, FOLDER, JSON, needs_extra
from offbeat.cli.progress import bar_of_runs, spinner
from offbeat.errors import InvalidValue, OffbeatError

TOKEN = click.option("--token", envvar="OFFBEAT_TOKEN", help="Token, where the server asks for one.")
CA = click.option("--ca", type=FILE, envvar="OFFBEAT_CA", help="Trust servers with a certificate from this authority.")


@click.command()
@click.argument("source", metavar="URL|DIR")
@TOKEN
@CA
@JSON
def status(source: str, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Show where a run stands.

    Give the URL of a server, or the folder of a run, whether it is being served or not.
    """
    from offbeat.cli.standing import status_of, words

    facts = status_of(source, token, ca)
    click.echo(json.dumps(facts) if as_json else words(facts))


@click.command()
@click.argument("folder", type=FOLDER, default=Path("runs"))
@JSON
def runs(folder: Path, as_json: bool) -> None:
    """List runs, simulated and served.

    FOLDER is searched with all folders below it.
    """
    from offbeat.cli.standing import run_folders, run_of, table
    from offbeat.storage.json_file import plain

    found = [run_of(path) for path in run_folders(folder)]
    if as_json:
        click.echo(json.dumps(plain(found)))
    elif not found:
        click.echo(f"No runs under {folder}.")
    else:
        table(found)


@click.command()
@click.argument("folder", type=FOLDER, default=Path("runs"))
@click.option(
    "--port", type=click.IntRange(0, 65535), default=7744, show_default=True, help="Port; 0 picks a free one."
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address of this machine to listen on.")
@click.option(
    "--public-name",
    default="",
    envvar="OFFBEAT_PUBLIC_NAME",
    help="Further names that browsers may use, separated by commas: those of a proxy before it.",
)
def ui(folder: Path, port: int, host: str, public_name: str) -> None:
    """Show and compare runs in a browser.

    FOLDER is searched with all folders below it. Ctrl-C ends.
    """
    from offbeat.cli.standing import run_folders

    with needs_extra("web"):
        from offbeat.web.ui_server import serve

    def ready(server: Any) -> None:
        click.echo(f"Runs are shown at {server.url} (Ctrl-C ends)", err=True)

    serve(folder, run_folders, host=host, port=port, ready=ready, public_name=public_name)


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("out", metavar="[OUT.html]", type=FILE, required=False)
@TOKEN
@CA
@JSON
def report(folder: Path, out: Path | None, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Write a report as one HTML file.

    DIR is the folder of a run, or holds the folders of several. The file opens offline; without OUT.html it is
    DIR/report.html.
    """
    from offbeat.report import report as write
    from offbeat.report.wording import size

    with bar_of_runs("runs", transient=True) as tell:
        path = write(folder, out, trouble=_trouble(folder, token, ca), tell=tell)
    count = path.stat().st_size
    click.echo(json.dumps({"path": str(path), "bytes": count}) if as_json else f"Wrote {path} ({size(count)})")


def _trouble(folder: Path, token: str | None, ca: Path | None) -> str | None:
    """The trouble that a running server reports; the folder of the run does not record it."""
    from offbeat.cli.remote import WHERE, call, url_of

    if (folder / WHERE).is_file():
        with suppress(OffbeatError):  # it was killed, or wants a token: the report is written without it
            return call(url_of(str(folder)), "GET", "/v1/status", token, ca).get("trouble") or None
    return None


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--journal", type=FILE, help="Also look up every acknowledgement in this journal of a worker.")
@JSON
def verify(folder: Path, journal: Path | None, as_json: bool) -> None:
    """Check a run's ledger and model.

    Looks for rows of the ledger in FOLDER that were lost or changed, computes the model again from the kept updates,
    and compares the bits. Exit status 1 where something is wrong.
    """
    from offbeat.server.verify import sentence
    from offbeat.server.verify import verify as verified

    with spinner("checking the ledger"):
        facts = verified(folder, journal)
    click.echo(json.dumps(facts) if as_json else sentence(facts))
    if not facts["agrees"]:
        raise SystemExit(1)


@click.command()
@click.argument("source", metavar="URL|DIR")
@click.argument("out", type=FILE, required=False)
@click.option(
    "--epoch", help="Version to write, or latest.  [default: the one that reached the target, else the newest]"
)
@click.option("--best", is_flag=True, help="Write the best version, of a run with --keep-best.")
@click.option("--average", is_flag=True, help="Write the averaged model, of a run with --average.")
@click.option(
    "--format", "form", type=click.Choice(["safetensors", "torch"]), help="Format of OUT.  [default: by its ending]"
)
@click.option("--ledger", type=FILE, help="Write the ledger of the run in DIR to OUT.csv or OUT.parquet.")
@TOKEN
@CA
def export(
    source: str,
    out: Path | None,
    epoch: str | None,
    best: bool,
    average: bool,
    form: str | None,
    ledger: Path | None,
    token: str | None,
    ca: Path | None,
) -> None:
    """Write a run's model, or its ledger, to a file.

    OUT is a safetensors file or, with the ending .pt or .pth, a torch state_dict.
    """
    if (out is None) == (ledger is None):
        raise InvalidValue("say where to: OUT.safetensors for a model, or --ledger OUT.csv for the ledger")
    if best and epoch is not None:
        raise InvalidValue(f"--best is one version and --epoch {epoch} another; give one of them")
    if average and (best or ledger is not None):
        raise InvalidValue("--average is a model of its own; leave out --best and --ledger")
    if ledger is not None:
        from offbeat.storage.export import export_ledger

        with spinner("writing the ledger"):
            export_ledger(Path(source), ledger)
        click.echo(f"Wrote {ledger}")
        return
    if out is not None:
        from offbeat.cli.models import export_model

        form = form or ("torch" if out.suffix in (".pt", ".pth") else "safetensors")
        with spinner("writing the model"):
            t = export_model(source, out, "best" if best else epoch or "result", form, token, ca, average=average)
        click.echo(f"Wrote {f'the averaged model up to version {t}' if average else f'version {t}'} to {out}")


@click.command()
@click.argument("server", metavar="URL|DIR")
@click.argument("worker", type=int)
@TOKEN
@CA
def readmit(server: str, worker: int, token: str | None, ca: Path | None) -> None:
    """Lift the quarantine of a worker.

    WORKER is its number in the run.
    """
    from offbeat.cli.remote import call, url_of

    call(url_of(server), "POST", f"/v1/workers/{worker}/readmit", token, ca)
    click.echo(f"Worker {worker} may go on.")


@click.command()
@click.argument("server", metavar="URL|DIR")
@TOKEN
@CA
def pause(server: str, token: str | None, ca: Path | None) -> None:
    """Give out no more tasks.

    Tasks that workers have are finished and judged, also over a restart of the server, until the run is resumed.
    """
    from offbeat.cli.remote import call, url_of

    call(url_of(server), "POST", "/v1/pause", token, ca)
    click.echo("Paused: no task is given out until `offbeat resume`.")


@click.command()
@click.argument("server", metavar="URL|DIR")
@TOKEN
@CA
def resume(server: str, token: str | None, ca: Path | None) -> None:
    """Go on with a run that is paused."""
    from offbeat.cli.remote import call, url_of

    call(url_of(server), "POST", "/v1/resume", token, ca)
    click.echo("Resumed: tasks are given out again.")


@click.command()
@click.argument("folder", type=FOLDER)
@click.argument("trackers", nargs=-1, required=True)
@click.option("--live", is_flag=True, help="Follow the run until it is finished.")
def track(folder: Path, trackers: tuple[str, ...], live: bool) -> None:
    """Show a run in TensorBoard or MLflow.

    FOLDER is the run's. TRACKERS are tensorboard:DIR or mlflow:URI, such as mlflow:sqlite:///mlflow.db.
    """
    from offbeat.trackers.follower import follow
    from offbeat.trackers.sink import sink_of

    with spinner("telling the trackers"):
        sinks = [sink_of(tracker) for tracker in trackers]
        finished = follow(folder, sinks, live=live)
    there, rest = (
        "The trackers have the whole run.",
        "The trackers have the run so far; run the same command again later.",
    )
    click.echo(there if finished else rest, err=True)
