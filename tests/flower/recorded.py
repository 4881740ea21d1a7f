"""Runs on Flower as `tests/golden/make_runs.py` records them, and how they are resumed: on a Grid without time.

python tests/flower/recorded.py finished|interrupted|resumed FOLDER
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, MetricRecord

from tests.flower.fake import FakeGrid, Node, start

EPOCHS, KILLED_AT, KILLED = 9, 6, 9


def go(folder: Path, rule: str, *, dies_at: int = EPOCHS + 1) -> dict[str, Any]:
    """Run to the end, or until version `dies_at` is to be evaluated: there the process ends, as by SIGKILL."""

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
        if t == dies_at:
            os._exit(KILLED)
        return MetricRecord({"count": float(arrays["n"].numpy())})

    grid = FakeGrid({3: Node(1.0), 8: Node(2.5), 4: Node(1.25, joins_at=2.0)})
    start(grid, rule, dir=folder, epochs=EPOCHS, evaluate_every=1, checkpoint_every=2, seed=2, evaluate_fn=evaluate)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary


def finished(folder: Path) -> dict[str, Any]:
    return go(folder, "fedasync")


def interrupted(folder: Path) -> dict[str, Any]:
    """Ends the process."""
    return go(folder, "delta", dies_at=KILLED_AT)


def resumed(folder: Path) -> dict[str, Any]:
    """What comes out of the interrupted one."""
    summary = go(folder, "delta")
    return {name: summary[name] for name in ("t", "applied", "staleness_mean", "staleness_largest", "x_sha256")}


if __name__ == "__main__":
    ways = {"finished": finished, "interrupted": interrupted, "resumed": resumed}
    print(json.dumps(ways[sys.argv[1]](Path(sys.argv[2]))))  # noqa: T201
