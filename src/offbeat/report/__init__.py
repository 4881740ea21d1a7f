"""Owns reports: what a run, or several, came to, as one HTML file that opens offline and mails well.

Rules kept here:
- The file is written whole or not at all.
- Pictures and templates are an extra: without matplotlib or Jinja2 one line says what to install, before anything is
  read.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.report.facts import ReportedRun, RunFacts, Unreadable, read_run, runs_under
from offbeat.report.run_curve import RunCurve
from offbeat.report.troubles import mishaps
from offbeat.report.wording import clean
from offbeat.storage.disk import aside
from offbeat.storage.run_folder import SETTINGS

if TYPE_CHECKING:
    from offbeat.sim.curve import CurvePoint

__all__ = ["REPORT", "curve_run", "report", "report_curves"]

REPORT = "report.html"
SEED_FOLDER = "seed-"
"""How comparisons call the folder of a run in that of its method."""

Tell = Callable[[float, int], None]


def report(
    folder: Path | str,
    out: Path | str | None = None,
    *,
    trouble: str | None = None,
    tell: Tell = lambda *_: None,
    now: datetime | None = None,
) -> Path:
    """Write the report of a run, or of all runs under a folder; answers where.

    `trouble` is what a run's server says is wrong with it; `tell` hears how many runs were read, of all.
    """
    folder = Path(folder)
    out, at = Path(out or folder / REPORT), now or datetime.now().astimezone()
    run_page, comparison_page = _pages()
    if (folder / SETTINGS).is_file():
        tell(0, 1)
        return _written(out, run_page(read_run(folder), at, trouble))
    runs, unreadable = _read_all(folder, tell)
    return _written(out, comparison_page(folder.resolve().name, runs, at, unreadable))


def report_curves(out: Path | str, title: str, runs: Sequence[ReportedRun], *, now: datetime | None = None) -> Path:
    """Write a comparison of runs of which only curves and results are left; `curve_run` makes each of them."""
    _, comparison_page = _pages()
    if not runs:
        raise InvalidValue(f"there is no run to report on in {title!r}")
    return _written(Path(out), comparison_page(title, runs, now or datetime.now().astimezone()))


def curve_run(
    label: str, settings: Mapping[str, Any], points: Sequence["CurvePoint"], results: Mapping[str, float | None]
) -> ReportedRun:
    """A run of `report_curves`: its method's label, settings (with `task` and `seed`), points, and results by name."""
    return ReportedRun(label, settings, RunCurve.of(points), results)


# --- pieces ----------------------------------------------------------------------------------------------------------


def _pages() -> tuple[Callable[..., str], Callable[..., str]]:
    try:
        pages = [import_module(f"offbeat.report.{name}") for name in ("run_page", "comparison_page")]
    except ModuleNotFoundError as error:
        raise MissingExtra(str(error.name), "plots") from error
    return pages[0].run_page, pages[1].comparison_page


def _written(out: Path, page: str) -> Path:
    with aside(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return out


def _read_all(folder: Path, tell: Tell) -> tuple[list[ReportedRun], list[Unreadable]]:
    paths = runs_under(folder)
    runs, unreadable = [], []
    for done, path in enumerate(paths):
        tell(done, len(paths))
        try:
            runs.append(_measured(folder, read_run(path)))
        except OffbeatError as error:
            unreadable.append(Unreadable(str(path.relative_to(folder)), str(error)))
    if not runs:
        why = f": {clean(unreadable[0].why)}" if unreadable else "; give the --dir of a run or of a comparison"
        raise InvalidValue(f"there is no run to report on under {folder}{why}")
    return runs, unreadable


def _measured(folder: Path, facts: RunFacts) -> ReportedRun:
    """What a comparison needs of a run; its ledger's sums are let go."""
    name = facts.folder.relative_to(folder)
    label = name.parent if name.name.startswith(SEED_FOLDER) and name.parent.name else name
    fold = facts.fold
    results = {
        "t": facts.t,
        "applied": fold.applied,
        "refused": facts.refused,
        "gradients": fold.gradients,
        "staleness_mean": fold.staleness_mean,
    }
    wrong = sum(mishap.many for mishap in mishaps(fold, facts.troubles) if not mishap.is_harmless)
    return ReportedRun(str(label), facts.settings, facts.curve, results, facts.state, wrong, str(name))
