"""Owns the pictures of reports: matplotlib's SVG, made small, themed and fit to stand in one page with others.

Rules kept here:
- A picture's colours are the page's (CSS variables), so it follows light, dark and print.
- Ids in a picture begin with its name, so that pictures do not take each other's parts. No picture names an address.
- Text is never read as mathematics: a label may hold anything.
- However many updates there were, a picture has a bounded number of points.
"""

import io
import re
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offbeat.plots import COLOURS, DASHES, LONGER_MANY
from offbeat.report.run_curve import Numbers, thinned
from offbeat.report.wording import clean

SIZE = (4.6, 3.0)
BARS_MAX = 60
LONG_TAIL = 3
"""Where the largest staleness is this many times that of nearly all updates, the picture ends before it."""
ALL_BUT_A_FEW = 0.995
SHOWN_MIN = 5
"""Even where nothing was stale, there is an axis."""
POINTS_MAX = 400
DOTS_MAX = 400
FEW = 40
"""Points that are marked one by one."""
MANY = 80
"""Dots that must be smaller to be told apart."""
LOG_FROM = 100
"""Where the largest value is more than this many times the smallest, the axis is logarithmic."""
INK, GRID, ALARM, BARS = "#010101", "#020202", "#030303", "#040404"
"""Stand for the page's colours until the picture is drawn."""
VARIABLES = {INK: "ink", GRID: "grid", ALARM: "alarm", BARS: "bars"} | {
    colour: f"c{number}" for number, colour in enumerate(COLOURS)
}
LINES_MAX = len(COLOURS) * len(DASHES)
LOOK: Any = {
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "text.parse_math", "legend.frameon"), False),
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "offbeat",
}
NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_drawing = threading.Lock()
"""matplotlib's settings are the process's."""


def curve(
    name: str, x: Numbers, y: Numbers, *, label: str, metric: str, mean: tuple[Numbers, Numbers] | None = None
) -> Markup:
    """A metric along an axis; evaluations that were no number are crosses at the foot.

    `mean` is the same metric of the averaged model.
    """
    gaps = x[np.isnan(y)]
    x, y = thinned(x, y, POINTS_MAX)

    def draw(axes: Axes) -> None:
        marker = "o" if np.isfinite(y).sum() <= FEW else ""
        axes.plot(x, y, color=COLOURS[0], marker=marker, markersize=3, label="newest version")
        if mean is not None:
            axes.plot(*thinned(*mean, POINTS_MAX), color=COLOURS[1], linestyle="--", label="averaged model")
            axes.legend()
        crosses = gaps[:: 1 + len(gaps) // DOTS_MAX]
        axes.plot(
            crosses, np.zeros(len(crosses)), "x", color=ALARM, transform=axes.get_xaxis_transform(), clip_on=False
        )
        _few(axes.xaxis)
        _scale(axes, [y] if mean is None else [y, mean[1]])
        axes.set(xlabel=label, ylabel=clean(metric, 40))

    return _drawn(name, f"{metric} against {label}", draw)


def overlay(
    name: str, lines: Sequence[tuple[Numbers, Numbers, Numbers]], *, label: str, metric: str, short: str
) -> Markup:
    """The same metric of several methods: where, mean and spread of each."""

    def draw(axes: Axes) -> None:
        for number, (x, mean, spread) in enumerate(lines[:LINES_MAX]):
            colour, dash = look(number)
            marker = "o" if len(x) == 1 else ""
            axes.plot(x, mean, drawstyle="steps-post", color=COLOURS[colour], linestyle=dash, marker=marker)
            if spread.any():
                edges = (mean - spread, mean + spread)
                axes.fill_between(x, *edges, step="post", color=COLOURS[colour], alpha=0.18, linewidth=0)
        _scale(axes, [mean for _, mean, _ in lines])
        is_long = _stretch(axes, [x for x, _, _ in lines])
        axes.set(xlabel=label + ", log scale" * is_long, ylabel=clean(metric, 40))

    return _drawn(name, f"{metric} of every method against {short}", draw)


def look(number: int) -> tuple[int, str]:
    """Colour and dash of the n-th line: colours first."""
    return number % len(COLOURS), DASHES[number // len(COLOURS) % len(DASHES)]


def staleness(name: str, applied: Mapping[int, int], refused: Mapping[int, int], largest: int) -> Markup:
    """How many updates had which staleness; refused ones on top."""
    edges, below = bars(applied, largest)
    _, above = bars(refused, largest)
    total = np.add(below, above)

    def draw(axes: Axes) -> None:
        axes.stairs(below, edges, fill=True, color=BARS, label="applied")
        if any(above):
            axes.stairs(total, edges, baseline=below, fill=True, color=ALARM, label="refused")
            axes.legend()
        axes.set(xlabel="staleness (versions)", ylabel="updates", xlim=(edges[0], edges[-1]))
        axes.set_ylim(0, max(1, *total) * 1.05)
        _few(axes.xaxis, integer=True)
        _few(axes.yaxis, integer=True)

    return _drawn(name, "Histogram of staleness", draw)


def weights(
    name: str,
    dots: Mapping[tuple[int, float], int],
    rule: Sequence[tuple[int, float]],
    largest: int,
    label: str,
    t: int,
) -> Markup:
    shown = _coarse({dot: count for dot, count in dots.items() if dot[0] <= largest})
    most = max(shown.values(), default=1)

    def draw(axes: Axes) -> None:
        small = 0.5 if len(shown) > MANY else 1.0
        for size, least, below in ((3, 0, 0.01), (4.5, 0.01, 0.1), (6.5, 0.1, 2)):
            some = [dot for dot, count in shown.items() if least <= count / most < below]
            places = ([u for u, _ in some], [w for _, w in some])
            axes.plot(*places, "o", color=COLOURS[0], markersize=small * size, markeredgewidth=0)
        if rule:
            axes.plot(*zip(*rule, strict=True), color=COLOURS[1], linewidth=1.2, label=f"the rule at epoch {t:,}")
        axes.set(xlabel="staleness (versions)", ylabel=label, xlim=(-0.5, largest + 0.5))
        axes.set_ylim(min([0.0, *(w for _, w in shown)]), 1.08 * max([1e-9, *(w for _, w in [*shown, *rule])]))
        _few(axes.xaxis, integer=True)
        if rule:
            axes.legend()

    return _drawn(name, f"{label} against staleness", draw)


def _coarse(dots: Mapping[tuple[int, float], int]) -> dict[tuple[int, float], int]:
    """So few that they can be drawn: neighbours become one."""
    shown, columns, rows = dict(dots), 200, 100
    highest = max((abs(w) for _, w in dots), default=1.0) or 1.0
    largest = max((u for u, _ in dots), default=0) + 1
    while len(shown) > DOTS_MAX:
        shown, wide, tall = {}, max(1, largest // columns), highest / rows
        for (u, w), count in dots.items():
            place = (u // wide * wide, round(w / tall) * tall)
            shown[place] = shown.get(place, 0) + count
        columns, rows = columns * 3 // 4, rows * 3 // 4
    return shown


# --- counts ----------------------------------------------------------------------------------------------------------


def quantile(counts: Mapping[int, int], part: float) -> int:
    """The smallest value that this part of all does not exceed.

    >>> quantile({0: 5, 1: 4, 7: 1}, 0.5), quantile({0: 5, 1: 4, 7: 1}, 0.95), quantile({}, 0.5)
    (0, 7, 0)
    """
    wanted, seen = part * sum(counts.values()), 0
    for value, count in sorted(counts.items()):
        seen += count
        if seen >= wanted:
            return value
    return 0


def shown_to(counts: Mapping[int, int]) -> int:
    """The largest staleness that a picture shows: a few stragglers do not squeeze all others.

    >>> shown_to({0: 900, 10: 100, 4000: 1}), shown_to({0: 5, 9: 5}), shown_to({0: 5})
    (10, 9, 5)
    """
    largest, most = max(counts, default=0), max(SHOWN_MIN, quantile(counts, ALL_BUT_A_FEW))
    return most if largest > LONG_TAIL * most else max(SHOWN_MIN, largest)


def bars(counts: Mapping[int, int], largest: int, most: int = BARS_MAX) -> tuple[list[float], list[int]]:
    """Edges and heights of a histogram; where there are too many values, several share a bar.

    >>> bars({0: 5, 1: 4, 3: 1}, 3)
    ([-0.5, 0.5, 1.5, 2.5, 3.5], [5, 4, 0, 1])
    """
    width = -(-(largest + 1) // most)
    heights = [0] * -(-(largest + 1) // width)
    for value, count in counts.items():
        if value <= largest:
            heights[value // width] += count
    return [width * index - 0.5 for index in range(len(heights) + 1)], heights


# --- axes ------------------------------------------------------------------------------------------------------------


def _few(axis: Axis, *, integer: bool = False) -> None:
    axis.set_major_locator(MaxNLocator(6, integer=integer))
    axis.set_major_formatter("{x:,g}")


def _scale(axes: Axes, values: Sequence[Numbers]) -> None:
    """Logarithmic where a few large values would flatten all others."""
    known = np.concatenate([*values, np.empty(0)])
    known = known[np.isfinite(known)]
    if len(known) and known.min() > 0 and known.max() / known.min() > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")


def _stretch(axes: Axes, places: Sequence[Numbers]) -> bool:
    """Is the axis logarithmic, because one method goes on for much longer than another?"""
    ends = [x[-1] for x in places if len(x)]
    if not ends or min(ends) <= 0 or max(ends) <= LONGER_MANY * min(ends):
        _few(axes.xaxis)
        return False
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.xaxis.set_minor_formatter("")
    return True


# --- SVG -------------------------------------------------------------------------------------------------------------


def _drawn(name: str, alt: str, draw: Callable[[Axes], None]) -> Markup:
    with _drawing, warnings.catch_warnings(), mpl.rc_context():
        warnings.simplefilter("ignore")  # a letter that matplotlib's font lacks: the page's fonts draw it
        mpl.rcdefaults()
        mpl.rcParams.update(LOOK)
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.subplots())
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=NO_METADATA)
    return _inline(name, alt, file.getvalue())


def _inline(name: str, alt: str, svg: str) -> Markup:
    box = " ".join(str(round(72 * inches, 1)) for inches in SIZE)
    inside = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    inside = re.sub(r"<style.*?</style>", "", inside, flags=re.DOTALL)
    inside = re.sub(r"<[^>]*>", lambda found: _tag(found[0], name), inside)  # only tags: text holds no < or >
    inside = re.sub(r">\s+<", "><", inside).strip()
    begin = Markup('<svg viewBox="0 0 {}" role="img" aria-label="{}" class="picture">').format(box, clean(alt))
    return begin + Markup(f"{inside}</svg>")  # noqa: S704 (matplotlib's, with its own text escaped)


def _tag(found: str, name: str) -> str:
    if found.startswith("<g "):
        found = re.sub(r' id="[^"]*"', "", found)  # nothing refers to a group
    found = re.sub(r' id="', f' id="{name}-', found)
    found = re.sub(r'(url\(|href=")#', rf"\1#{name}-", found)
    found = re.sub(r'( transform="rotate\(-0 [^"]*")|( ?font-family: [^;"]*;)', "", found)
    found = re.sub(r' (d|x|y)="([^"]*)"', lambda part: f' {part[1]}="{_short(part[2])}"', found)
    return re.sub(r"#[0-9a-f]{6}\b", _variable, found)


def _short(numbers: str) -> str:
    """A tenth of a point is finer than the eye sees."""
    return " ".join(re.sub(r"(\.\d)\d+", r"\1", numbers).split())


def _variable(found: "re.Match[str]") -> str:
    known: Any = VARIABLES.get(found[0])
    return f"var(--{known})" if known else found[0]
