"""Owns what a command shows while it works, and how Ctrl-C stops it.

Rules kept here:
- Nothing is shown where the output is not a terminal.
- rich takes a tenth of a second to import, so it is imported when something is shown.
"""

import signal
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ParamSpec

from offbeat.cli.metric_words import metric_words

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from offbeat.sim.run import Simulation

INTERRUPTED = 130
FAILED = 3
Told = ParamSpec("Told")


@contextmanager
def spinner(words: str) -> Iterator[None]:
    """Words and seconds, for work of unknown length."""
    from rich.progress import SpinnerColumn, TextColumn

    with _progress(SpinnerColumn(), TextColumn(words), transient=True) as progress:
        progress.add_task(words, total=None)
        yield


@contextmanager
def bar_of_runs(name: str, *, transient: bool = False) -> Iterator[Callable[[float, int], None]]:
    """A bar for several runs; call what it gives with how many are done, and of how many."""
    with _bar(name, transient=transient) as update:
        yield lambda done, count: update(completed=done, total=count, news=f"{done:.3g} of {count} runs")


@contextmanager
def bar_of_bytes(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for a copy; call what it gives with how many bytes are done, and of how many."""
    with _bar(name, transient=True) as update:
        yield lambda done, size: update(
            completed=done, total=size, news=f"{done >> 20:,} of {size >> 20:,} MB" if done < size else "verifying"
        )


@contextmanager
def bar_of_run(name: str) -> Iterator[Callable[["Simulation"], None]]:
    """A bar for one run: epochs, metric, staleness, epochs per second; call what it gives as the run goes on."""
    with _bar(f"{name:<9}", total=1) as update:
        yield lambda simulation: update(completed=simulation.share(), news=_news(simulation))


@contextmanager
def _bar(name: str, total: float | None = None, *, transient: bool = False) -> Iterator[Callable[..., None]]:
    from rich.progress import BarColumn, TextColumn

    with _progress(TextColumn(name), BarColumn(), TextColumn("{task.fields[news]}"), transient=transient) as progress:
        yield partial(progress.update, progress.add_task(name, total=total, news=""))


def _news(simulation: "Simulation") -> str:
    c = simulation.coordinator
    metrics = next(reversed(c.evaluations)).metrics if c.evaluations else {}
    metric = "  ".join(f"{name} {said}" for name, said in list(metric_words(metrics).items())[-1:])
    speed = c.t / max(simulation.wall_s(), 1e-9)
    return f"epoch {c.t:<6} {metric}  staleness {simulation.curve.fold.staleness_mean:.1f}  {speed:.0f}/s"


def _progress(*columns: "ProgressColumn", transient: bool = False) -> "Progress":
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    console = Console(stderr=True)
    disable = not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=transient, disable=disable)


def plain_table(*headings: str, left: Collection[str], title: str | None = None) -> "Table":
    """A table without lines; the columns in `left` are texts, the others numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right")
    return table


@contextmanager
def stopping(show: Callable[Told, None]) -> Iterator[Callable[Told, None]]:
    """`show`, which also stops the run once Ctrl-C or SIGTERM has come; a second one ends the process at once."""
    from offbeat.sim.run import StopRequested

    asked = False

    def ask(number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(number, before[signal.Signals(number)])

    def watch(*arguments: Told.args, **more: Told.kwargs) -> None:
        show(*arguments, **more)
        if asked:
            raise StopRequested

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield watch
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
