"""The commands that can go to Ray, where it is not installed or not meant: one line each, and nothing is left."""

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.simulation.comparing import written

from offbeat.cli import main

MISSING = "Error: ray is not installed; run: pip install 'offbeat[ray]'\n"


def said(*arguments: str) -> str:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    return result.stderr


def test_without_ray_every_option_says_in_one_line_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    spec = str(written(tmp_path))
    before = sorted(tmp_path.iterdir())
    task = str(tmp_path / "pull.py")
    assert said("simulate", task, "--executor", "ray") == MISSING
    assert said("simulate", task, "--executor", "ray:3", "--ray-address", "auto", "--dir", "out") == MISSING
    assert said("compare", spec, "--on", "ray", "--dir", "out") == MISSING
    assert said("reproduce", "clock", "--scale", "smoke", "--on", "ray", "--dir", "out", "--work", "work") == MISSING
    assert [path for path in sorted(tmp_path.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("simulate", "pull.py", "--ray-address", "auto"), "ray_address is set, but executor is auto; set executor to"),
        (("compare", "spec.toml", "--ray-address", "auto"), "ray_address is set, but the runs stay here; say --on ray"),
        (
            ("simulate", "pull.py", "--executor", "ray", "--ray-results-max", "0"),
            "ray_results_max is 0 but must be >= 1",
        ),
    ],
)
def test_what_would_change_nothing_is_refused(
    arguments: tuple[str, ...], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    error = said(*arguments)
    assert line in error
    assert error.count("\n") == 1
