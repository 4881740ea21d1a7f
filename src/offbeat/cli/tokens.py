"""Owns `offbeat init` and `offbeat token`: the certificates and tokens of a server.

Rules kept here:
- A token is shown once, when it is made. It is written to a file only if the user asks for that.
- Mistakes are refused before anything is made: a folder is set up whole, or not at all.
- A command that is printed as the next step can be copied into a shell as it stands.
"""

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from offbeat.cli.options import FOLDER, JSON
from offbeat.errors import InvalidValue
from offbeat.storage.disk import cannot_write

if TYPE_CHECKING:
    from offbeat.server.access import Role
    from offbeat.server.certificates import Issued

FILES = "tokens"
"""The folder that --write-tokens writes to."""
SETTINGS, PROPOSED = "settings.toml", "proposed.toml"
"""What `init` proposes for the run, in the folder that it makes; and where it is in this package."""
FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)


@click.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.option("--host", "hosts", multiple=True, help="Name or address that workers connect to; may be repeated.")
@click.option(
    "--worker", "workers", multiple=True, help="Worker to make a token for; may be repeated.  [default: worker-1]"
)
@click.option("--write-tokens", is_flag=True, help="Write the tokens to DIR/tokens instead of printing them.")
@click.option("--renew", is_flag=True, help="Only renew the server's certificate; without --host, for the same hosts.")
@JSON
def init(
    folder: Path, hosts: Sequence[str], workers: Sequence[str], write_tokens: bool, renew: bool, as_json: bool
) -> None:
    """Set up certificates and tokens for a server.

    DIR is a new folder, which `offbeat serve --access DIR` then uses. DIR/settings.toml proposes settings for a run
    with workers that you do not control, such as a limit on the step of an update; read it before you use it.
    """
    if not renew:
        _init(folder, hosts, workers or ("worker-1",), write_tokens, as_json)
    elif workers or write_tokens:
        raise InvalidValue("--renew makes a certificate only; for tokens use: offbeat token add DIR NAME")
    else:
        _renew(folder, hosts, as_json)


@click.group()
def token() -> None:
    """Make, list and revoke tokens.

    They are kept in the folder that `offbeat init` made.
    """


@token.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("name")
@click.option(
    "--role",
    type=click.Choice(["worker", "viewer", "admin"]),
    default="worker",
    show_default=True,
    help="What the token allows.",
)
@JSON
def add(folder: Path, name: str, role: str, as_json: bool) -> None:
    """Make a token for NAME and show it once. A running server knows it within a second."""
    from offbeat.server.access import TOKENS, Role, TokenBook

    made = TokenBook(folder / TOKENS).add(name, Role(role))
    click.echo(json.dumps({"name": name, "role": role, "token": made}) if as_json else made)
    if not as_json:  # on standard error, so that a script reads the token alone
        click.echo(f"The token of {name} ({role}); it is not shown again.", err=True)


@token.command("list")
@click.argument("folder", metavar="DIR", type=FOLDER)
@JSON
def list_(folder: Path, as_json: bool) -> None:
    """List the owners and roles of the tokens in DIR, without the tokens themselves."""
    from offbeat.server.access import TOKENS, TokenBook

    rows = [(e.name, str(e.role), e.created, e.revoked) for e in TokenBook(folder / TOKENS).entries()]
    head = ("name", "role", "created", "revoked")
    if as_json:
        click.echo(json.dumps({"tokens": [dict(zip(head, row, strict=True)) for row in rows]}))
    else:
        _table([head, *((*row[:3], row[3] or "-") for row in rows)])


@token.command()
@click.argument("folder", metavar="DIR", type=FOLDER)
@click.argument("name")
@JSON
def revoke(folder: Path, name: str, as_json: bool) -> None:
    """Revoke the token of NAME. A running server refuses it within a second."""
    from offbeat.server.access import TOKENS, TokenBook

    entry = TokenBook(folder / TOKENS).revoke(name)
    done = {"name": entry.name, "role": str(entry.role), "revoked": entry.revoked}
    click.echo(json.dumps(done) if as_json else f"Revoked {name}; a running server refuses it within a second.")


# --- init ------------------------------------------------------------------------------------------------------------


def _init(folder: Path, hosts: Sequence[str], workers: Sequence[str], write_tokens: bool, as_json: bool) -> None:
    from offbeat.server.access import TOKENS, TokenBook
    from offbeat.server.certificates import make

    roles = _roles(workers, write_tokens)
    _check_empty(folder)
    issued = make(folder, hosts)
    tokens = TokenBook.begin(folder / TOKENS).add_all(roles)
    files = _written(folder / FILES, tokens) if write_tokens else {}
    _propose(folder / SETTINGS)
    commands = _commands(folder, issued, tokens[workers[0]], files.get(workers[0]))
    if as_json:
        click.echo(
            json.dumps(
                _report(folder, issued)
                | {"settings": str(folder / SETTINGS), "tokens": tokens, "token_files": files, "next": commands}
            )
        )
        return
    _table([("name", "role", "token"), *((name, str(role), (files or tokens)[name]) for name, role in roles.items())])
    kept = f"The tokens are in {folder / FILES}: hand each to its owner, then delete it."
    click.echo("\n" + (kept if files else "Keep the tokens: they are not shown again."))
    click.echo(f"Settings that suit workers elsewhere are in {folder / SETTINGS}: read it before you start.")
    click.echo(f"\nOn the server:\n  {commands['serve']}")
    click.echo(f"For a worker, with its own token, on a machine that has a copy of ca.pem:\n  {commands['work']}")
    if not hosts:
        shown = shlex.quote(str(folder))
        click.echo(f"\nThe certificate is for this machine alone; for others: offbeat init {shown} --renew --host NAME")


def _check_empty(folder: Path) -> None:
    try:
        empty = not folder.exists() or not any(folder.iterdir())
    except OSError as error:
        raise cannot_write(folder, error) from error
    if not empty:
        raise InvalidValue(f"{folder} is not empty; choose a new folder, or add --renew to renew its certificate")


def _roles(workers: Sequence[str], write_tokens: bool) -> "dict[str, Role]":
    """The role of every name; names that are not allowed are refused."""
    from offbeat.server.access import Role, check_name

    names = ("admin", "viewer", *workers)
    for name, times in Counter(names).items():
        if times > 1:
            raise InvalidValue(f"{name!r} is given twice; names are unique, and admin and viewer are made anyway")
        check_name(name)
        if write_tokens and not FILE_NAME.fullmatch(name):
            raise InvalidValue(f"{name!r} cannot name a file; with --write-tokens use letters, digits, '.', '_', '-'")
    return {"admin": Role.ADMIN, "viewer": Role.VIEWER} | dict.fromkeys(workers, Role.WORKER)


def _written(folder: Path, tokens: dict[str, str]) -> dict[str, str]:
    """Write one file per token, readable by its owner only; returns the paths."""
    from offbeat.server.access import write_private

    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise cannot_write(folder, error) from error
    files = {name: folder / f"{name}.token" for name in tokens}
    for name, path in files.items():
        write_private(path, f"{tokens[name]}\n".encode())
    return {name: str(path) for name, path in files.items()}


def _propose(path: Path) -> None:
    """Write the settings that are proposed; one that is there stays as it is."""
    text = (resources.files("offbeat.cli") / PROPOSED).read_text("utf-8")
    try:
        with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error) from error


def _commands(folder: Path, issued: "Issued", token: str, file: str | None) -> dict[str, str]:
    """The next commands: on the server, and on the machine of a worker."""
    from offbeat.server.settings import ServerSettings

    settings = shlex.quote(str(folder / SETTINGS))
    host = f"[{issued.hosts[0]}]" if ":" in issued.hosts[0] else issued.hosts[0]
    given = f"--token-file {shlex.quote(file)}" if file else f"--token {token}"
    ca = shlex.quote(str(folder / "ca.pem"))
    return {
        "serve": f"offbeat serve TASK --access {shlex.quote(str(folder))} --host 0.0.0.0 --settings {settings}",
        "work": f"offbeat work TASK --server https://{host}:{ServerSettings().port} --ca {ca} {given}",
    }


def _renew(folder: Path, hosts: Sequence[str], as_json: bool) -> None:
    from offbeat.server.certificates import renew

    issued = renew(folder, hosts)
    if as_json:
        click.echo(json.dumps(_report(folder, issued)))
    else:
        click.echo(f"Renewed {folder / 'server.pem'} until {issued.until:%Y-%m-%d} for {', '.join(issued.hosts)}.")
        click.echo("Workers need nothing new; start the server again for it to use the certificate.")


def _report(folder: Path, issued: "Issued") -> dict[str, Any]:
    files = {"ca": "ca.pem", "certificate": "server.pem", "key": "server.key"}
    paths = {name: str(folder / file) for name, file in files.items()}
    return {"dir": str(folder), **paths, "hosts": issued.hosts, "until": issued.until.isoformat()}


def _table(rows: Iterable[Sequence[str]]) -> None:
    """Print a table as plain text, so that no token is broken over two lines."""
    lines = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
