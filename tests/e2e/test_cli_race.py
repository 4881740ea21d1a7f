"""`offbeat race` as a user calls it: results, wrong input, missing extras."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def race(folder: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(main, ["race", "--dir", str(folder), "--json", *options])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output.splitlines()[-1])
    return answer


def test_one_seed_is_one_run(tmp_path: Path) -> None:
    small = ("--devices", "20", "--in-flight-max", "5", "--virtual-s", "5")
    first, again = race(tmp_path, *small), race(tmp_path, *small)
    other = race(tmp_path, *small, "--seed", "2")
    assert first["x_sha256"] == again["x_sha256"] != other["x_sha256"]
    assert first["fedavg"]["x_sha256"] == again["fedavg"]["x_sha256"]


def test_it_learns_and_is_ahead_of_waiting(tmp_path: Path) -> None:
    result = race(tmp_path)
    assert result["accuracy"] >= 0.93
    assert result["accuracy"] > result["fedavg"]["accuracy"]
    assert result["target_reached_s"] < result["virtual_s"] / 2
    assert result["fedavg"]["staleness_largest"] == 0
    assert Path(result["picture"]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "0"], "1..1437 devices"),
        (["--in-flight-max", "101"], "1..100"),
        (["--virtual-s", "0"], "1..10000"),
        (["--virtual-s", "nan"], "1..10000"),
        (["--seed", "-1"], ">= 0"),
        (["--dir", "/dev/null/x"], "choose another folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_status_2(tmp_path: Path, options: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["race", "--dir", str(tmp_path / "new"), *options])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "demo"), ("torch", "demo"), ("sklearn", "digits")])
def test_a_missing_extra_is_named(package: str, extra: str) -> None:
    """The import is blocked in a process of its own, as if the package were not installed."""
    code = f"import sys; sys.modules[{package!r}] = None; from offbeat.cli import main; main(['race'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"pip install 'offbeat[{extra}]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_needs_neither_torch_nor_numba() -> None:
    code = (
        "import sys\n"
        "from offbeat.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted({'torch', 'numba', 'matplotlib', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.rstrip().endswith("[]")
