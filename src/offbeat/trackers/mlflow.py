"""Owns MLflow: a run of ours is a run there, in the experiment that MLFLOW_EXPERIMENT_NAME names, else `offbeat`.

Rules kept here:
- The step is the epoch t, and the time is the run's own clock.
- A tag says how much has arrived, so that a run that is followed again goes on in the same one.
- Numbers are sent many at a time.
- MLflow's own reports to its makers are off unless the environment turns them on.
"""

import os
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from posixpath import normpath
from typing import Any

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.storage.json_file import plain
from offbeat.trackers.sink import Report, RunDescription

EXPERIMENT = "offbeat"
KEY, TOLD = "offbeat.key", "offbeat.told"
"""Tags: which run it is, and how many points and windows of it are there."""
BATCH = 999
"""Numbers in one request; with the tag that says how many, MLflow takes no more."""
PARAMS = 100
"""Settings in one request; MLflow takes no more."""
NAME_MAX = 240
TEXT_MAX = 500
"""Characters of a setting, or of a part of the summary."""
_STRANGE = re.compile(r"[^\w\-. :/]", re.ASCII)


class MLflow:
    """Sends to the store at a URI: sqlite:///FILE, or http(s)://HOST of an MLflow server."""

    def __init__(self, where: str) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            self._entities = import_module("mlflow.entities")
            tracking = import_module("mlflow.tracking")
        except ModuleNotFoundError as error:
            raise MissingExtra(str(error.name), "mlflow") from error
        try:
            self._client = tracking.MlflowClient(tracking_uri=where)
        except Exception as error:  # MLflow's own, SQLAlchemy's, or the disk's
            raise InvalidValue(f"MLflow cannot use this store: {error}") from error
        self._run = ""
        self._begun_at = 0.0
        self._told = 0
        self._waiting: list[Any] = []

    def begin(self, run: RunDescription) -> int:
        """Find the run, or make it; answers how much of it is there."""
        self._waiting.clear()
        self._begun_at = run.begun_at
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{_quoted(run.key)}'", max_results=1)
        if found:
            self._run, self._told = found[0].info.run_id, int(found[0].data.tags.get(TOLD, 0))
            self._client.update_run(self._run, status="RUNNING")
        else:
            tags = {KEY: _quoted(run.key), TOLD: "0"}
            made = self._client.create_run(experiment, self._at_ms(0.0), tags, run.name)
            self._run, self._told = made.info.run_id, 0
            self._set(run.settings)
        return self._told

    def tell(self, report: Report) -> None:
        at_ms = self._at_ms(report.at_s)
        numbers = [self._entities.Metric(_name(n), value, at_ms, report.t) for n, value in report.values.items()]
        if len(self._waiting) + len(numbers) > BATCH:
            self.flush()
        self._waiting += numbers
        self._told += 1

    def flush(self) -> None:
        """Send the numbers that wait, and how many points and windows that makes."""
        *parts, last = _parts(self._waiting, BATCH)
        for numbers in parts:
            self._client.log_batch(self._run, numbers)
        if last:
            told = self._entities.RunTag(TOLD, str(self._told))
            self._client.log_batch(self._run, last, tags=[told])
            self._waiting = []

    def end(self, summary: Mapping[str, Any]) -> None:
        """The results that are no curve are tags; the run is over."""
        for name, value in plain(summary).items():
            if name not in ("settings", "task") and value is not None:
                self._client.set_tag(self._run, f"offbeat.{_name(name)}", str(value)[:TEXT_MAX])
        length_s = summary.get("virtual_s", summary.get("wall_s", 0.0))  # on the run's own clock
        self._client.set_terminated(self._run, "FINISHED", self._at_ms(float(length_s)))

    def close(self) -> None:
        self._waiting.clear()

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", EXPERIMENT)
        found = self._client.get_experiment_by_name(name)
        return str(found.experiment_id if found is not None else self._client.create_experiment(name))

    def _set(self, settings: Mapping[str, Any]) -> None:
        known = {name: value for name, value in plain(settings).items() if value is not None}
        params = [self._entities.Param(_name(name), str(value)[:TEXT_MAX]) for name, value in known.items()]
        for some in _parts(params, PARAMS):
            self._client.log_batch(self._run, params=some)

    def _at_ms(self, at_s: float) -> int:
        return round((self._begun_at + at_s) * 1000)


def _parts(items: list[Any], size: int) -> Iterator[list[Any]]:
    """Slices of at most `size`; at least one, which may be empty."""
    for start in range(0, max(1, len(items)), size):
        yield items[start : start + size]


def _name(name: str) -> str:
    """As MLflow lets things be called: few characters, and no path that could be written in another way.

    >>> _name("top-5 accuracy (%)"), _name("../loss"), _name("offbeat/at_s")
    ('top-5 accuracy ___', '_.._loss', 'offbeat/at_s')
    """
    known = _STRANGE.sub("_", name)[:NAME_MAX]
    return known if normpath(known) == known and known[0] not in "./" else f"_{known.replace('/', '_')}"


def _quoted(key: str) -> str:
    return key.replace("'", "_")
