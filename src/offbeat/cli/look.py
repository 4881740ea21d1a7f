"""Owns the commands that look at runs: status, runs, verify, export; and readmit, which steps in.

What each needs is imported when it runs.
"""

import json
from pathlib import Path

import click

from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.cli.progress import spinner
from offbeat.errors import InvalidValue

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
@click.argument("folder", type=FOLDER)
@JSON
def verify(folder: Path, as_json: bool) -> None:
    """Replay a served run and compare the bits.

    The model is computed again from the ledger and the kept updates in FOLDER. Exit status 1 where it differs.
    """
    from offbeat.server.replay import verify as replay

    with spinner("replaying the ledger"):
        facts = replay(folder)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        click.echo(
            f"epoch {facts['t']}, {facts['applied']} updates, replayed from epoch {facts['from_t']}\n"
            f"server {facts['x_sha256']}\nreplay {facts['replay_sha256']}\n"
            + ("They agree." if facts["agrees"] else "They DIFFER.")
        )
    if not facts["agrees"]:
        raise SystemExit(1)


@click.command()
@click.argument("source", metavar="URL|DIR")
@click.argument("out", type=FILE, required=False)
@click.option("--epoch", default="latest", show_default=True, help="Version of the model to write.")
@click.option(
    "--format", "form", type=click.Choice(["safetensors", "torch"]), help="Format of OUT.  [default: by its ending]"
)
@click.option("--ledger", type=FILE, help="Write the ledger of the run in DIR to OUT.csv or OUT.parquet.")
@TOKEN
@CA
def export(
    source: str, out: Path | None, epoch: str, form: str | None, ledger: Path | None, token: str | None, ca: Path | None
) -> None:
    """Write a run's model, or its ledger, to a file.

    OUT is a safetensors file or, with the ending .pt or .pth, a torch state_dict.
    """
    if (out is None) == (ledger is None):
        raise InvalidValue("say where to: OUT.safetensors for a model, or --ledger OUT.csv for the ledger")
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
            t = export_model(source, out, epoch, form, token, ca)
        click.echo(f"Wrote version {t} to {out}")


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
