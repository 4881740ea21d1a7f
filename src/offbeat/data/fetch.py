"""Owns the way from an address to a checked archive: limits, progress, and what to tell where there is no network."""

from collections.abc import Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from offbeat.data.chunks import Broken, checked, read, reason, save
from offbeat.data.source import Source
from offbeat.errors import OffbeatError

TIMEOUT_S = 30.0
"""How long a server may stay silent: while connecting, and between two reads."""
AGENT = "offbeat"
"""Some hosts refuse Python's own name."""


def fetch(source: Source, path: Path, root: Path) -> None:
    """Write the archive to `path`, from the first address that serves it whole and unchanged."""
    failed = []
    for address in source.addresses():
        try:
            with Bar(source) as bar:
                save(path, checked(bar.shown(_body(address)), source.size, source.digest))
        except Broken as broken:
            failed.append(f"{address}: {broken}")
        else:
            return
    raise OffbeatError(f"cannot fetch {source.title} ({'; '.join(failed)})\n{source.by_hand(root)}")


def _body(address: str) -> Iterator[bytes]:
    try:
        request = Request(address, headers={"User-Agent": AGENT})  # noqa: S310 (the source checked the scheme)
        with urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310 (see above)
            yield from read(response)
    except HTTPError as error:
        error.close()
        raise Broken(f"HTTP {error.code} {reason(error)}") from error
    except (OSError, HTTPException, ValueError) as error:
        raise Broken(reason(error)) from error


class Bar:
    """Progress of one download, on a terminal only."""

    def __init__(self, source: Source) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(source.archive), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self.progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self.bar = self.progress.add_task(source.archive, total=source.size)

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def shown(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """The same chunks; the bar moves with them."""
        for chunk in chunks:
            self.progress.advance(self.bar, len(chunk))
            yield chunk
