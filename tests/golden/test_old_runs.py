"""Runs that earlier versions left open here, and go on to the bits that those versions would have reached."""

import json
import shutil
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.golden.old_runs import (
    EXPECTED,
    HERE,
    PAGES,
    copied,
    in_json,
    kind_of,
    model_of,
    recorded_settings,
    resumed_server,
    resumed_simulation,
    said,
    settings_of,
    shown,
    standing,
    verified,
)

VERSIONS = sorted(HERE.glob("runs_of_*"))
RUNS = [run for version in VERSIONS for run in sorted(version.iterdir()) if run.is_dir()]
SERVED = [run for run in RUNS if kind_of(run) == "served"]
SIMULATED = [run for run in RUNS if kind_of(run) == "simulated"]
FINISHED = [run for run in RUNS if (run / "summary.json").exists()]


def expected(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.parent / EXPECTED).read_text())[run.name]
    return found


def some(runs: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("run", runs, ids=lambda run: f"{run.parent.name}-{run.name}")


def still(there: Any, here: Any, at: str = "") -> None:
    """All that was said is said; more may be. Sums of floats may be taken in another order."""
    if isinstance(there, dict):
        assert isinstance(here, dict), at
        for name, value in there.items():
            assert name in here, f"{at} has no {name!r} any more"
            still(value, here[name], f"{at}.{name}")
    elif isinstance(there, list):
        assert isinstance(here, list), at
        assert len(here) == len(there), at
        for number, (old, new) in enumerate(zip(there, here, strict=True)):
            still(old, new, f"{at}[{number}]")
    elif isinstance(there, float):
        assert here == pytest.approx(there, rel=1e-12), at
    else:
        assert here == there, at


def test_there_is_a_run_of_every_kind() -> None:
    names = {run.name for run in RUNS if run.parent.name == "runs_of_0_1"}
    assert names == {
        *("simulated_finished", "simulated_interrupted"),
        *("served_delta_finished", "served_delta_interrupted", "served_fedasync_interrupted"),
        *("flower_finished", "flower_interrupted"),
    }


# --- settings --------------------------------------------------------------------------------------------------------

NOT_SET = """
    staleness_max norm_max norm_median_max bad_updates_max group_deadline_s in_flight_max devices down_mbps
    up_mbps availability epochs gradients until_s target evaluate_every gamma rho weight_decay batch_norm
    warm_up batch_size local_passes local_iterations local_iterations_min local_iterations_max partition_sizes
    width vocabulary test_max ray_address ray_gpus ray_results_max
"""
OF_0_1: dict[str, Any] = dict.fromkeys(NOT_SET.split()) | {
    "rule": "fedasync",
    "alpha": 0.6,
    "alpha_schedule": "constant",
    "staleness_fn": "polynomial:0.5",
    "staleness_policy": "weigh",
    "pace_wait_s": 60.0,
    "norm_policy": "refuse",
    "scheduler": "random",
    "trigger_every_s": 0.0,
    "over_selection": 1.0,
    "tasks_per_device": 1,
    "device_model": "lognormal:0.5",
    "availability_period_s": 86_400.0,
    "dropout": 0.0,
    "mix_s": 0.0,
    "lease_s": 3_600.0,
    "queue_max": 64,
    "retry_after_s": 1.0,
    "answers_kept": 100_000,
    "released_kept": 100_000,
    "gamma_schedule": "constant",
    "partition": "iid",
    "seed": 0,
    "executor": "auto",
}
"""What every setting of 0.1 is where a run's folder does not say it."""
BEFORE_THEY_EXISTED: dict[str, Any] = dict.fromkeys(
    ("task_args", "silent_s", "value_max", "keep_best", "weights", "average", "device_cache")
)
"""Settings that are newer than 0.1, with the values that make a run the same as before: a new setting goes here."""
WORLD = {"device_model": "lognormal:1", "dropout": 0.1, "lease_s": 4.0, "evaluate_every": 7, "devices": 6}
CHOSEN: dict[str, dict[str, Any]] = {
    "simulated_finished": WORLD
    | {"epochs": 30, "seed": 3, "staleness_policy": "reject", "staleness_max": 1, "executor": "inline"},
    "simulated_interrupted": WORLD | {"rule": "fedbuff:3", "epochs": 20, "seed": 4, "executor": "inline"},
    "served_delta_finished": {"rule": "delta", "epochs": 24, "evaluate_every": 6, "seed": 5},
    "served_delta_interrupted": {"rule": "delta", "epochs": 24, "evaluate_every": 6, "seed": 5, "norm_max": 10.0},
    "served_fedasync_interrupted": {"epochs": 24, "evaluate_every": 6, "seed": 5},
    "flower_finished": {"epochs": 9, "evaluate_every": 1, "seed": 2},
    "flower_interrupted": {"rule": "delta", "epochs": 9, "evaluate_every": 1, "seed": 2},
}


@some([run for run in RUNS if run.parent.name == "runs_of_0_1"])
def test_a_setting_that_a_folder_lacks_has_the_value_that_it_had_before_it_existed(run: Path) -> None:
    settings = settings_of(run).as_dict()
    assert settings == OF_0_1 | BEFORE_THEY_EXISTED | CHOSEN[run.name]


@some(RUNS)
def test_settings_are_read_as_they_were_written(run: Path) -> None:
    still(recorded_settings(run), settings_of(run).as_dict())


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VERSIONS, ids=lambda version: version.name)
def pages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[str, Any], Any]:
    """What the page said, and what it says."""
    version: Path = request.param
    folder = Path(shutil.copytree(version, tmp_path_factory.mktemp("shown") / "runs"))
    return json.loads((version / PAGES).read_text()), shown(folder)


def test_the_page_says_what_it_said(pages: tuple[Mapping[str, Any], Any]) -> None:
    then, now = pages
    assert len(then) == 4 * len(now)
    for name, twin in then.items():
        run, view = name.split()
        still(twin, now[run][view], name)


@some(RUNS)
def test_status_says_what_it_said(run: Path, tmp_path: Path) -> None:
    still(expected(run)["status"], standing(copied(run, tmp_path)))


@some(RUNS)
def test_it_is_reported_listed_and_its_ledger_exported(run: Path, tmp_path: Path) -> None:
    copy = copied(run, tmp_path)
    said("report", copy, tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert expected(run)["status"]["task"] in report
    listed = in_json("runs", tmp_path)
    assert [(one["state"], one["t"]) for one in listed] == [
        (expected(run)["status"]["state"], expected(run)["status"]["t"])
    ]
    said("export", copy, "--ledger", tmp_path / "ledger.csv")
    with sqlite3.connect(copy / "ledger.sqlite") as ledger:
        (rows,) = ledger.execute("SELECT count(*) FROM events").fetchone()
    ledger.close()
    assert len((tmp_path / "ledger.csv").read_text().splitlines()) == rows + 1


@some([run for run in RUNS if run in FINISHED or run in SERVED])
def test_the_newest_model_has_the_same_bits(run: Path, tmp_path: Path) -> None:
    assert model_of(copied(run, tmp_path)) == expected(run)["x_sha256"]


@some(SERVED)
def test_a_replay_of_the_ledger_agrees(run: Path, tmp_path: Path) -> None:
    found = verified(copied(run, tmp_path))
    assert found["agrees"]
    assert found["chain"] == "none"
    assert found["from"] <= expected(run)["verify"]["from_t"]  # from x_0 now, where every update is kept
    still({name: value for name, value in expected(run)["verify"].items() if name != "from_t"}, found)


# --- going on --------------------------------------------------------------------------------------------------------


@some([run for run in SIMULATED if run not in FINISHED])
def test_an_interrupted_simulation_ends_with_the_bits_of_its_own_version(run: Path, tmp_path: Path) -> None:
    copied(run, tmp_path)
    still(expected(run)["resumed"], resumed_simulation(tmp_path))


@some(SERVED)
def test_a_server_goes_on_with_the_bits_of_its_own_version(run: Path, tmp_path: Path) -> None:
    """What was acknowledged is redone to the same x_t; then one worker, whose updates are known, does the rest."""
    copied(run, tmp_path)
    still(expected(run)["resumed"], resumed_server(tmp_path))


@some([run for run in SERVED if run not in FINISHED])
def test_the_interrupted_server_has_updates_to_redo(run: Path) -> None:
    newest = max((run / "checkpoints").glob("*.json"), key=lambda file: int(file.stem))
    assert json.loads(newest.read_text())["state"]["t"] < expected(run)["resumed"]["found"]["t"]
