"""The pictures: what is drawn, that nothing is left out, and what the axes say."""

import os
import subprocess
import sys
from math import exp, inf, nan
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.figure import Figure

from offbeat import plots
from offbeat.settings import Settings
from offbeat.sim.compare import Comparison
from offbeat.sim.curve import CurvePoint
from offbeat.sim.run import Simulation
from offbeat.sim.spec import Spec
from tests.simulation.quadratic import Quadratic


def curve(rate: float, length: int = 20, shift: float = 0.0) -> list[CurvePoint]:
    return [
        CurvePoint(t, 2.0 * t, 10 * t, 1000 * t, {"accuracy": 1 - exp(-rate * t) + shift}) for t in range(length + 1)
    ]


def comparison(curves: dict[str, list[list[CurvePoint]]], task: str = "digits") -> Comparison:
    seeds = range(1, 1 + len(next(iter(curves.values()))))
    return Comparison(Spec(task, tuple(seeds), {name: {} for name in curves}), curves, {})


def drawn(result: Comparison, axis: str = "virtual time") -> Figure:
    return plots._of_comparison(result, plots.AXES[axis])


def test_every_method_is_drawn_and_looks_like_no_other() -> None:
    names = [f"method {number}" for number in range(100)]
    figure = drawn(comparison({name: [curve(0.1 + 0.01 * i)] for i, name in enumerate(names)}))
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == names
    assert len({(line.get_color(), line.get_linestyle(), line.get_marker()) for line in lines}) == 100
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names


@pytest.mark.parametrize(("count", "is_outside"), [(1, False), (8, False), (9, True), (45, True)])
def test_a_long_legend_is_outside_and_leaves_the_axes_their_room(count: int, is_outside: bool) -> None:
    figure = drawn(comparison({f"alpha={number}": [curve(0.1)] for number in range(count)}))
    (axes,) = figure.axes
    assert bool(figure.legends) is is_outside
    assert (axes.get_legend() is None) is is_outside
    figure.draw_without_rendering()
    width, _ = figure.get_size_inches()
    assert axes.get_position().width * width > 5
    if is_outside:
        shown = figure.legends[0].get_window_extent()
        assert shown.x0 >= axes.get_window_extent().x1
        assert shown.y0 >= 0


def test_axes_name_their_units_and_the_title_what_is_shown() -> None:
    result = comparison({"a": [curve(0.1), curve(0.2)]}, task="some/where/mine.py")
    labels = {name: drawn(result, name).axes[0].get_xlabel() for name in plots.AXES}
    assert labels == {
        "virtual time": "virtual time (s)",
        "epochs": "epochs (versions published)",
        "gradients": "gradients (local iterations applied)",
        "bytes": "sent over the network, both ways (MB)",
    }
    axes = drawn(result).axes[0]
    assert axes.get_ylabel() == "accuracy"
    assert axes.get_title() == "mine.py: mean of 2 seeds ± standard deviation"
    assert drawn(comparison({"a": [curve(0.1)]})).axes[0].get_title() == "digits, seed 1"


def test_the_line_ends_at_the_mean_that_the_table_shows_and_the_band_is_the_spread() -> None:
    """Also where one seed ended earlier: it keeps what it reached."""
    result = comparison({"a": [curve(0.1, 10), curve(0.1, 20, shift=0.2)]})
    axes = drawn(result).axes[0]
    finals = [points[-1].metrics["accuracy"] for points in result.curves["a"]]
    (line,) = axes.get_lines()
    x, y = np.asarray(line.get_xdata()), np.asarray(line.get_ydata())
    assert (x[0], x[-1]) == (0.0, 40.0)
    assert y[-1] == pytest.approx(np.mean(finals))
    (band,) = axes.collections
    heights = np.asarray(band.get_paths()[0].vertices)
    at_start = heights[heights[:, 0] == 0.0][:, 1]
    assert at_start.max() - at_start.min() == pytest.approx(2 * np.std([0.0, 0.2], ddof=1))


def test_methods_of_very_different_length_share_a_logarithmic_axis() -> None:
    axes = drawn(comparison({"short": [curve(0.1, 3)], "long": [curve(0.1, 300)]})).axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "virtual time (s), log scale"
    assert [np.asarray(line.get_xdata())[-1] for line in axes.get_lines()] == [6.0, 600.0]
    assert drawn(comparison({"a": [curve(0.1, 3)], "b": [curve(0.1, 9)]})).axes[0].get_xscale() == "linear"


def test_what_cannot_be_drawn_is_a_gap(tmp_path: Path) -> None:
    points = [CurvePoint(t, float(t), t, t, {"loss/top 5": value}) for t, value in enumerate((1.0, inf, nan, 2.0))]
    result = comparison({"a": [points, points]})
    odd = Comparison(Spec("digits", (1, 2), {"a": {}}, metric="loss/top 5"), result.curves, {})
    names = {path.name for path in plots.comparison(tmp_path, odd)}
    assert "loss-top-5-virtual-time.svg" in names
    assert names == {path.name for path in tmp_path.iterdir()}
    y = np.asarray(drawn(odd).axes[0].get_lines()[0].get_ydata())
    assert np.isnan(y).any()
    assert set(y[~np.isnan(y)]) == {1.0, 2.0}


def test_a_finished_runs_folder_is_drawn(tmp_path: Path) -> None:
    Simulation(Quadratic([0.0, 1.0], [0.5, 0.5]), Settings(epochs=30, in_flight_max=2), folder=tmp_path / "run").run()
    paths = plots.run_folder(tmp_path / "run")
    assert [path.name for path in paths] == ["run.png", "run.svg"]
    assert all(path.stat().st_size > 1000 for path in paths)
    assert "staleness (versions)" in paths[1].read_text()


def test_drawing_leaves_the_users_backend_alone() -> None:
    program = "import matplotlib, offbeat.plots; print(matplotlib.get_backend())"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "MPLBACKEND": "svg"}, capture_output=True, check=True
    )
    assert done.stdout.split() == [b"svg"]
