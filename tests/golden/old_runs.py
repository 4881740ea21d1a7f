"""Opens and resumes recorded runs; of these tests, the one module that knows the insides of Offbeat.

    python tests/golden/old_runs.py FOLDER

writes down what the version on the path says about every run in FOLDER (`pages.json`, `expected.json`), and what comes
out when it resumes them. So the version that made the runs says what is expected of all later ones.
"""

import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from click.testing import CliRunner
from safetensors.numpy import load_file

from offbeat.cli import main
from offbeat.settings import Settings
from offbeat.storage.json_file import read_json
from tests.server.serving import Worker, serving
from tests.server.speaking import settled, until
from tests.web.looking import opened, runs_of

HERE = Path(__file__).resolve().parent
TASK, RUN, EXPECTED, PAGES = "line.py", "run", "expected.json", "pages.json"
NO_SETTINGS = ("task", "served", "flower", "layout")
"""What settings.json holds beside settings."""
OF_THIS_MOMENT = ("wall_s", "dir", "url", "pid")
STEP = 0.125
"""By how much the worker that finishes a served run enlarges every number."""


def said(*arguments: str | Path) -> str:
    """What a command prints; it must not fail."""
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (arguments, result.output, result.exception)
    return result.stdout


def in_json(*arguments: str | Path) -> Any:
    return json.loads(said(*arguments, "--json").splitlines()[-1])


def settings_of(run: Path) -> Settings:
    """The settings of a run, as this version understands them."""
    return Settings.of(recorded_settings(run))


def recorded_settings(run: Path) -> dict[str, Any]:
    """The settings of a run as they are written in its folder."""
    found = read_json(run / "settings.json")
    return {name: value for name, value in found.items() if name not in NO_SETTINGS}


# --- what is shown ---------------------------------------------------------------------------------------------------


def copied(run: Path, folder: Path) -> Path:
    """A copy that may be written to, beside a copy of its task."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / TASK, folder)
    return Path(shutil.copytree(run, folder / RUN))


def kind_of(run: Path) -> str:
    return run.name.partition("_")[0]


def shown(runs: Path) -> dict[str, Any]:
    """All that the page says of every run in a folder, by the run's name and the twin's."""
    twins = ("overview", "asynchrony", "workers", "updates")
    with opened(runs_of(runs)) as visitor:
        names = [run["name"] for run in visitor.get("/runs.json")["runs"]]
        pages = {name: {twin: visitor.get(f"/runs/{name}/{twin}.json") for twin in twins} for name in names}
    for page in pages.values():
        del page["overview"]["run"]["dir"]
    return pages


def standing(run: Path) -> dict[str, Any]:
    return without_moment(in_json("status", run))


def model_of(run: Path) -> str:
    """The digest of the newest model's numbers, as `offbeat export` gives them."""
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(temporary) / "x.safetensors"
        said("export", run, out)
        arrays = load_file(out)
    return sha256(b"".join(arrays[name].tobytes() for name in sorted(arrays)))


def verified(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = in_json("verify", run)
    return found


# --- going on --------------------------------------------------------------------------------------------------------


def resumed_simulation(folder: Path) -> dict[str, Any]:
    """The summary of the run in folder/run, after it was resumed by the command."""
    flags = [part for name, value in recorded_settings(folder / RUN).items() for part in flag(name, value)]
    return without_moment(in_json("simulate", folder / TASK, "--dir", folder / RUN, *flags))


def flag(name: str, value: Any) -> tuple[str, ...]:
    return () if value is None else (f"--{name.replace('_', '-')}", str(value))


def resumed_server(folder: Path) -> dict[str, Any]:
    """x_t as a server finds it in folder/run, and the summary after one worker has done what was left."""
    with serving(folder, recorded_settings(folder / RUN)) as running:
        status = settled(running)
        found = {"t": status["t"], "applied": status["applied"], "x_sha256": sha256(running.x)}
        if not status["finished"]:
            worker = Worker(running, "after")
            for _ in range(status["t"], status["epochs"]):
                worker.work(STEP)
                settled(running)  # on a busy machine the next lease would not wait for the mixing
        until((folder / RUN / "summary.json").exists)
    summary = json.loads((folder / RUN / "summary.json").read_text())
    return {"found": found, "summary": without_moment(summary)}


def without_moment(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts that are the same whenever and wherever it is run."""
    return {name: value for name, value in facts.items() if name not in OF_THIS_MOMENT}


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# --- recording -------------------------------------------------------------------------------------------------------


def expected_of(run: Path, folder: Path) -> dict[str, Any]:
    """What this version says about one run, in a copy."""
    copy = copied(run, folder)
    kind, finished = kind_of(run), (run / "summary.json").exists()
    expected: dict[str, Any] = {"status": standing(copy)}
    if kind == "served" or finished:
        expected |= {"x_sha256": model_of(copy)}
    if kind == "served":
        expected |= {"verify": verified(copy), "resumed": resumed_server(folder)}
    if kind == "simulated" and not finished:
        expected |= {"resumed": resumed_simulation(folder)}
    return expected


def record(runs: Path) -> None:
    """Writes what is expected of all runs in a folder: the pages, a line each, and everything else."""
    there = [run for run in sorted(runs.iterdir()) if run.is_dir()]
    with tempfile.TemporaryDirectory() as temporary:
        pages = shown(Path(shutil.copytree(runs, Path(temporary) / "shown")))
        expected = {run.name: expected_of(run, Path(temporary) / run.name) for run in there}
    lines = [f'"{name} {twin}": {json.dumps(said)}' for name, page in pages.items() for twin, said in page.items()]
    (runs / PAGES).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (runs / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    record(Path(sys.argv[1]))
