"""Owns what is shown while something takes long of which nobody can say how long: words, a spinner, seconds."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(words: str) -> Iterator[None]:
    """Show it on a terminal for as long as the block takes; nothing where the output is not one."""
    from rich.console import Console  # takes a tenth of a second, which `offbeat --help` has not
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn(words), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(words, total=None)
        yield
