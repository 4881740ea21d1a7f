"""Wall time to accuracy on one Flower fleet: FedAsync beside Flower's own FedAvg, same SuperNodes, same ClientApp.

Run it in the environment of `make test-flower`:

    .venv-flower/bin/python -m benchmarks.flower_digits [--seconds 180] [--repeats 2] [--png OUT.png]

A real SuperLink and four SuperNodes on this machine; three of them wait after each training, as slower machines would
take longer. The strategies take turns on the same fleet, so that a busy machine slows both.
"""

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.flower.superlink import SuperLink, until

ROOT = Path(__file__).parents[1]
DELAYS_S = (0.0, 2.0, 6.0, 20.0)
LEVELS = (0.8, 0.9, 0.95)
LR = 0.1
SLACK_S = 300.0
"""Extra time for the start, and for the last round."""

Curve = list[tuple[float, int, float]]
"""Seconds, epoch or round, accuracy."""


def app_in(folder: Path) -> Path:
    """A copy of the example with the comparison's ServerApp."""
    app = folder / "app"
    shutil.copytree(ROOT / "examples" / "flower_digits", app, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "benchmarks" / "flower_digits_server.py", app / "digits_app" / "server_app.py")
    settings = (app / "pyproject.toml").read_text()
    more = '\nstrategy = ""\nout = ""\nnodes = 4\nuntil-s = 60.0\n'
    (app / "pyproject.toml").write_text(settings + more)
    return app


def measured(link: SuperLink, app: Path, strategy: str, seconds: float, out: Path) -> Curve:
    """One run of one strategy."""
    config: dict[str, Any] = {"strategy": strategy, "out": str(out), "nodes": len(DELAYS_S), "lr": LR}
    link.run(app, until_s=seconds, **config)
    until(out.exists, f"{strategy} is done", seconds + SLACK_S)
    return [(at, t, accuracy) for at, t, accuracy in json.loads(out.read_text())]


def reached(curve: Curve, level: float) -> float | None:
    """Seconds until an accuracy was first reached."""
    return next((at for at, _, accuracy in curve if accuracy >= level), None)


def told(strategy: str, curve: Curve) -> str:
    """One line about one run."""
    times = ((level, reached(curve, level)) for level in LEVELS)
    levels = ", ".join(f"{level:.0%} {'never' if at is None else f'after {at:.0f} s'}" for level, at in times)
    at, t, accuracy = curve[-1]
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{strategy:8} {levels}; {accuracy:.1%} at {at:.0f} s, t = {t}; load {load}"


def draw(curves: dict[str, list[Curve]], path: Path) -> None:
    """Accuracy over wall time."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (strategy, runs), colour in zip(curves.items(), ("tab:blue", "tab:orange"), strict=True):
        for number, curve in enumerate(runs):
            at, _, accuracy = zip(*curve, strict=True)
            label = strategy if number == 0 else None
            axes.step(at, accuracy, where="post", color=colour, alpha=0.8, label=label)
    axes.set_xlabel("wall time (s)")
    axes.set_ylabel("accuracy on the test images")
    axes.set_ylim(0, 1)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--png", type=Path)
    asked = parser.parse_args()
    curves: dict[str, list[Curve]] = {"FedAsync": [], "FedAvg": []}
    with tempfile.TemporaryDirectory() as name, SuperLink(Path(name) / "fleet") as link:
        app = app_in(Path(name))
        for i, delay_s in enumerate(DELAYS_S):
            link.node(partition_id=i, num_partitions=len(DELAYS_S), delay_s=delay_s)
        for turn in range(asked.repeats):
            for strategy in curves:
                out = Path(name) / f"{strategy}-{turn}.json"
                curve = measured(link, app, strategy.lower(), asked.seconds, out)
                curves[strategy].append(curve)
                print(told(strategy, curve), flush=True)
    if asked.png:
        draw(curves, asked.png)


if __name__ == "__main__":
    main()
