"""What holds for all tests: none fails because the machine is busy, none renders pictures that it does not look at."""

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest

from offbeat.sim.run import plots

if find_spec("hypothesis"):  # the environment of Flower's tests has none
    from hypothesis import HealthCheck, settings

    settings.register_profile("offbeat", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("offbeat")


@pytest.fixture(autouse=True)
def _blank_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figure of a finished run is made, its files are empty: rendering them takes longer than most of the runs.

    tests/unit/test_plots.py renders them, and so do the programs that tests start.
    """

    def run_folder(path: Path) -> list[Path]:
        with patch.object(plots(), "_saved", _blank):
            files: list[Path] = plots().run_folder(path)
            return files

    monkeypatch.setattr("offbeat.sim.lockstep.plots", lambda: plots() and SimpleNamespace(run_folder=run_folder))


def _blank(_figure: object, folder: Path, name: str) -> list[Path]:
    files = [folder / f"{name}.{ending}" for ending in ("png", "svg")]
    for file in files:
        file.touch()
    return files
