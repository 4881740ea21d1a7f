"""Owns the command `backup`; what it needs is imported when it runs."""

import json
from pathlib import Path

import click

from offbeat.cli.options import FOLDER, JSON
from offbeat.cli.progress import bar_of_bytes
from offbeat.cli.viewing import CA, TOKEN


@click.command()
@click.argument("source", metavar="URL|DIR")
@click.argument("out", type=FOLDER)
@TOKEN
@CA
@JSON
def backup(source: str, out: Path, token: str | None, ca: Path | None, as_json: bool) -> None:
    """Back up a run, also while it goes on.

    Give the URL of a server, with an administrator's token, or the folder of a run on this machine. OUT must be new; it
    is there when the backup is verified. To restore it, serve it: offbeat serve TASK --dir OUT. It then goes on as a
    run of its own.
    """
    from offbeat.cli.remote import backup_stream, is_url
    from offbeat.server.backup import back_up, receive
    from offbeat.server.verify import sentence

    with bar_of_bytes("backup") as tell:
        if is_url(source):
            facts = receive(lambda: backup_stream(source, token, ca), out, tell)
        else:
            facts = back_up(Path(source), out, tell)
    said = {"path": str(out), "bytes": sum(file.stat().st_size for file in out.rglob("*") if file.is_file())}
    click.echo(json.dumps(facts | said) if as_json else f"{sentence(facts)}\nWrote {out}")
