"""Owns TensorBoard: a run is a folder of event files there, written with TensorBoard's own writer.

Rules kept here:
- The step is the epoch t, and the time is the run's own clock.
- Our files are known by their ending. A run that is followed again writes them anew; other files are not touched.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from offbeat.errors import MissingExtra
from offbeat.trackers.sink import Report, RunDescription, UpdateWindow

BINS = 40
"""Of the histograms of staleness and alpha_t."""
QUEUE_MAX = 1000
FLUSH_S = 3600
"""The follower says when to flush."""


class TensorBoard:
    """Writes to DIR/NAME."""

    def __init__(self, where: str) -> None:
        self.root = Path(where)
        try:
            self._writers = import_module("tensorboard.summary.writer.event_file_writer")
            self._events = import_module("tensorboard.compat.proto.event_pb2")
            self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
            self._hparams = import_module("tensorboard.plugins.hparams.summary_v2")
        except ModuleNotFoundError as error:
            raise MissingExtra("tensorboard", "tensorboard") from error
        self._writer: Any = None
        self._begun_at = 0.0

    def begin(self, run: RunDescription) -> int:
        """Whatever an earlier follower wrote of this run is written anew."""
        self.close()
        ending = f".{crc32(run.key.encode()):08x}.offbeat"
        folder = place(self.root, run.name, ending)
        for file in ours(folder, ending):
            file.unlink()
        self._begun_at = run.begun_at
        self._writer = self._writers.EventFileWriter(str(folder), QUEUE_MAX, FLUSH_S, ending)
        settings = {name: _setting(value) for name, value in run.settings.items() if value is not None}
        self._add(self._hparams.hparams_pb(settings, trial_id=run.key, start_time_secs=run.begun_at), 0, 0.0)
        return 0

    def tell(self, report: Report) -> None:
        summary = self._summaries.Summary()
        for name, value in report.values.items():
            summary.value.add(tag=name, simple_value=value)
        if isinstance(report, UpdateWindow) and report.staleness:
            summary.value.add(tag="offbeat/staleness", histo=self._histogram(report.staleness))
            summary.value.add(tag="offbeat/alpha_t", histo=self._histogram(report.alpha_t))
        self._add(summary, report.t, report.at_s)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def end(self, _summary: Mapping[str, Any]) -> None:
        self.close()

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _histogram(self, values: tuple[float, ...]) -> Any:
        numbers = np.asarray(values, np.float64)
        counts, edges = np.histogram(numbers, BINS)
        facts = {"min": numbers.min(), "max": numbers.max(), "num": numbers.size, "sum": numbers.sum()}
        squares = float(np.square(numbers).sum())
        return self._summaries.HistogramProto(
            **facts, sum_squares=squares, bucket_limit=edges[1:].tolist(), bucket=counts.tolist()
        )

    def _add(self, summary: Any, t: int, at_s: float) -> None:
        if self._writer is None:
            raise AssertionError("a run is begun before it is told of")
        self._writer.add_event(self._events.Event(wall_time=self._begun_at + at_s, step=t, summary=summary))


def place(root: Path, name: str, ending: str) -> Path:
    """Where a run goes: under its name, or with a number where another run has taken that name."""
    taken = root / name
    if len(ours(taken, "")) == len(ours(taken, ending)):
        return taken
    return root / f"{name}{ending.removesuffix('.offbeat').replace('.', '-')}"


def ours(folder: Path, ending: str) -> list[Path]:
    """The event files in a folder that end like this."""
    return sorted(folder.glob(f"*tfevents*{ending}"))


def _setting(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)
