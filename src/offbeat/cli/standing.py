"""Owns the state of runs as commands show it: asked from a server, or read from the files of a folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from offbeat.cli.metric_words import metric_line, metrics_in
from offbeat.cli.progress import plain_table
from offbeat.cli.remote import WHERE, call, is_url, url_of
from offbeat.errors import InvalidValue
from offbeat.storage.json_file import plain
from offbeat.storage.run_folder import LEDGER, SETTINGS, RunFolder
from offbeat.worker.api_answers import Unreachable


def status_of(source: str, token: str | None, ca: Path | None) -> dict[str, Any]:
    if is_url(source):
        return call(source, "GET", "/v1/status", token, ca)
    RunFolder.open(Path(source))
    if (Path(source) / WHERE).is_file():
        try:
            return call(url_of(source), "GET", "/v1/status", token, ca)
        except Unreachable:
            pass  # the server was killed: its files tell
    return from_files(Path(source))


def from_files(path: Path) -> dict[str, Any]:
    """The status of a run that is not being served, counted from its ledger as its page counts it."""
    from offbeat.web.overview import overview
    from offbeat.web.run_reader import RunReader

    reading = RunReader(path)
    reading.refresh()
    found = overview(reading)
    same = ("t", "epochs", "applied", "in_flight", "queued", "workers", "silent", "paused", "duplicates")
    return dict(
        plain(
            {
                **{
                    name: found[name] for name in (*same, "metrics", "metrics_t", "staleness_mean", "staleness_largest")
                },
                "state": reading.state,
                "finished": reading.state == "finished",
                "rejected": sum(found["rejected"].values()),
                "task": found["run"]["task"],
                "trouble": None,
                "reason": reading.fold.ended,
            }
        )
    )


def words(facts: dict[str, Any]) -> str:
    metrics = metric_line(facts["metrics"]) or "none yet"
    state = "finished" if facts["finished"] else facts.get("state", "running")
    state = f"{state}, paused" if facts.get("paused") and not facts["finished"] else state
    silent = f", {facts['silent']} silent" if facts.get("silent") else ""
    epochs = f" of {facts['epochs']}" if facts["epochs"] else ""
    lines = [
        f"task        {facts['task']} ({state}{': ' + facts['reason'] if facts.get('reason') else ''})",
        f"epoch       {facts['t']}{epochs}; {facts['applied']} updates mixed, {facts['queued']} queued",
        f"metrics     {metrics}" + (f" (epoch {facts['metrics_t']})" if facts.get("metrics_t") is not None else ""),
        f"staleness   mean {facts['staleness_mean']:.1f}, largest {facts['staleness_largest']}",
        f"workers     {facts['workers']} joined, {facts['in_flight']} tasks in flight{silent}",
        f"refused     {facts['rejected']} updates, {facts['duplicates']} duplicates",
    ]
    if facts.get("result_t") is not None:
        lines.append(f"result      version {facts['result_t']}, which reached the target")
    if facts.get("best_t") is not None:
        lines.append(f"best        version {facts['best_t']}")
    if facts.get("trouble"):
        lines.append(f"TROUBLE     {facts['trouble']}")
    return "\n".join(lines)


def run_folders(folder: Path) -> Iterator[Path]:
    if not folder.is_dir():
        raise InvalidValue(f"there is no folder {folder}")
    return (settings.parent for settings in sorted(folder.rglob(SETTINGS)) if (settings.parent / LEDGER).is_file())


def run_of(path: Path) -> dict[str, Any]:
    folder = RunFolder.open(path)
    summary = folder.summary
    found = {"dir": str(path), "state": folder.state, "task": folder.settings.get("task") or "?"}
    found |= {"rule": folder.settings.get("rule", "?")}
    if summary is not None:
        return found | {"t": summary["t"], "metrics": metrics_in(summary)}
    facts = from_files(path)
    return found | {"t": facts["t"], "metrics": facts["metrics"]}


def table(found: list[dict[str, Any]]) -> None:
    texts = ("folder", "state", "task", "rule")
    shown = plain_table(*texts, "t", "metrics", left=(*texts, "metrics"))
    for run in found:
        shown.add_row(run["dir"], run["state"], run["task"], run["rule"], str(run["t"]), metric_line(run["metrics"]))
    Console(highlight=False).print(shown)
