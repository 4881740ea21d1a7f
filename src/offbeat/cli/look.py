"""Owns the commands that look at runs: status, runs, verify, export; and readmit, which steps in.

What each needs is imported when it runs.
"""

import json
from pathlib import Path

import click

from offbeat.cli.options import FILE, FOLDER, JSON
from offbeat.cli.waiting import waiting
from offbeat.errors import InvalidValue

TOKEN = click.option("--token", envvar="OFFBEAT_TOKEN", help="For a server with access control.")
CA = click.option("--ca", type=FILE, envvar="OFFBEAT_CA", help="Trust servers with a certificate from this authority.")


@click.command()
@click.argument("source", metavar="URL|DIR")
@TOKEN
@CA
@JSON
def status(source: str, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Where a served run stands: of a server by its URL, or of a folder, served or not."""
    from offbeat.cli.standing import status_of, words

    facts = status_of(source, token, ca)
    click.echo(json.dumps(facts) if as_json else words(facts))


@click.command()
@click.argument("folder", type=FOLDER, default=Path("runs"))
@JSON
def runs(folder: Path, as_json: bool) -> None:
    """List the runs under FOLDER, simulated and served."""
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
    """Replay a served run from its ledger and updates, and compare the bits. Exit status 1 where they differ."""
    from offbeat.server.verify import verify as replay

    with waiting("replaying the ledger"):
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
@click.option("--epoch", default="latest", show_default=True, help="Which version of the model.")
@click.option("--format", "form", type=click.Choice(["safetensors", "torch"]), help="[default: torch for .pt and .pth]")
@click.option("--ledger", type=FILE, help="Write the ledger of the run in DIR to OUT.csv or OUT.parquet.")
@TOKEN
@CA
def export(
    source: str, out: Path | None, epoch: str, form: str | None, ledger: Path | None, token: str | None, ca: Path | None
) -> None:
    """Write a model of a run to OUT (safetensors, or a torch state_dict), or its ledger."""
    if (out is None) == (ledger is None):
        raise InvalidValue("say where to: OUT.safetensors for a model, or --ledger OUT.csv for the ledger")
    if ledger is not None:
        from offbeat.storage.export import export_ledger

        with waiting("writing the ledger"):
            export_ledger(Path(source), ledger)
        click.echo(f"Wrote {ledger}")
        return
    if out is not None:
        from offbeat.cli.models import export_model

        form = form or ("torch" if out.suffix in (".pt", ".pth") else "safetensors")
        with waiting("writing the model"):
            t = export_model(source, out, epoch, form, token, ca)
        click.echo(f"Wrote version {t} to {out}")


@click.command()
@click.argument("server", metavar="URL|DIR")
@click.argument("worker", type=int)
@TOKEN
@CA
def readmit(server: str, worker: int, token: str | None, ca: Path | None) -> None:
    """Lift the quarantine of a worker."""
    from offbeat.cli.remote import call, url_of

    call(url_of(server), "POST", f"/v1/workers/{worker}/readmit", token, ca)
    click.echo(f"Worker {worker} may go on.")
