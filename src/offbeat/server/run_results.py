"""Owns what a served run leaves when it is over: x.safetensors and summary.json, both of the version that it is about.

Where an averaged model is kept, it is in average.safetensors.

Rule kept here: metrics, digest and model are of one version. `t` says how far the run went, `result_t` which version it
is about. `metrics_t` is another one only where that version could not be evaluated, and `average_t` only where workers
measured that version: then the averaged model is that of the newest.
"""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.core.layout import Model
from offbeat.digests import digest_of_file
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.wanted import evaluation_of
from offbeat.server.served_run import ServedRun
from offbeat.server.views import counts
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import write_json
from offbeat.storage.run_folder import AVERAGE, FINAL, SUMMARY
from offbeat.storage.sealed_model import sealed_parts

COUNTED = ("t", "epochs", "applied", "gradients", "rejected", "duplicates")
"""What the summary takes over from the status."""
SAID = ("result_t", "metrics_t", "average_t", "best_t", "best_value")
"""What it says besides, where it is known."""


def write_results(folder: Path, run: ServedRun, staleness: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Write the model, then the summary that says that the run is finished; nothing where that is done."""
    if (folder / SUMMARY).exists():
        return
    facts, newest = run.driver.ask(lambda c: (_facts(c), run.mixer.x)).result()
    x = run.kept.of(facts["result_t"]) if facts["result_t"] != facts["t"] else newest
    if x is None:  # the run reached its target in a version that was gone when that was known
        x, facts = newest, facts | {"result_t": facts["t"]}
    average_t, mean = result_average(run)
    if mean is not None:
        facts |= {"average_t": average_t}
        Disk().write_whole(folder / AVERAGE, sealed_parts(mean, {"t": str(average_t)}))
        about = {**about, "files_sha256": {AVERAGE: digest_of_file(folder / AVERAGE)}}
    Disk().write_whole(folder / FINAL, sealed_parts(x, {"t": str(facts["result_t"])}))
    about = {**about, "dir": str(folder), "file_sha256": digest_of_file(folder / FINAL)}
    write_json(folder / SUMMARY, _summary(facts, x, staleness, about))


def result_average(run: ServedRun) -> tuple[int, Model | None]:
    """The averaged model of the version that the run is about or, where that is not kept, of the newest."""
    newest, result_t = run.driver.newest, run.coordinator.outcome.result_t
    if newest.mean is None or result_t is None or result_t == newest.t:
        return newest.t, newest.mean
    kept = run.kept.mean_of(result_t)
    return (newest.t, newest.mean) if kept is None else (result_t, kept)


def _facts(c: Coordinator) -> dict[str, Any]:
    shown = evaluation_of(c, c.result) or (c.evaluations[-1] if c.evaluations else None)
    facts = counts(c) | {"result_t": c.result, "failed": c.outcome.failed}
    facts |= {"metrics": dict(shown.metrics) if shown else {}, "metrics_t": shown.t if shown else None}
    if c.outcome.best is not None and c.plan.keep_best is not None:
        facts |= {"best_value": c.outcome.best.metrics[c.plan.keep_best.metric]}
    return facts


def _summary(facts: dict[str, Any], x: Model, staleness: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    results = {name: facts[name] for name in COUNTED} | {"wall_s": round(facts["at_s"], 3)}
    results |= {**staleness, **facts["metrics"]}
    results |= {name: facts[name] for name in SAID if facts.get(name) is not None}
    results |= {"x_sha256": hashlib.sha256(x.vector.data).hexdigest(), "ended": facts["reason"]}
    return results | {"failed": facts["failed"], **about}
