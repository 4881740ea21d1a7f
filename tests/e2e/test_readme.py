"""Everything executable in the README is executed."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from offbeat.cli import main

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_python_blocks_run_and_print_what_the_text_block_after_them_says() -> None:
    """A python block may be followed by a text block: its output."""
    ran = 0
    for (language, code), following in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, "README.md", "exec"), {"__name__": "__main__"})  # noqa: S102 (it is our own README)
        if following[0] == "text":
            assert printed.getvalue() == following[1]
        ran += 1
    assert ran >= 2


def test_every_make_target_in_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    named = set(re.findall(r"[`$] ?make ([a-z-]+)", text))
    assert {"demo", "test"} <= named <= targets


def test_the_race_prints_what_the_readme_shows(tmp_path: Path) -> None:
    """Line by line; numbers may differ on another kind of processor, and the times always do."""
    (block,) = (text for language, text in BLOCKS if language == "console" and "offbeat race" in text)
    command, *shown = block.splitlines()
    assert shlex.split(command) == ["$", "offbeat", "race"]
    result = CliRunner().invoke(main, ["race", "--dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    printed = result.output.replace(str(tmp_path), "runs/race").splitlines()
    assert [_words(line) for line in printed] == [_words(line) for line in shown]
    assert (tmp_path / "race.png").stat().st_size > 10_000


def test_the_demo_trains_with_real_processes_and_prints_what_the_readme_shows(tmp_path: Path) -> None:
    (block,) = (text for language, text in BLOCKS if language == "console" and "make demo" in text)
    command, *shown = block.splitlines()
    assert shlex.split(command) == ["$", "make", "demo"]
    assert "offbeat demo" in (ROOT / "Makefile").read_text()
    result = CliRunner().invoke(main, ["demo", "--dir", str(tmp_path / "demo"), "--json"])
    assert result.exit_code == 0, result.output
    *printed, facts = result.output.replace(str(tmp_path / "demo"), "runs/demo").splitlines()
    assert [_words(line) for line in printed] == [_words(line) for line in shown]
    told = json.loads(facts)
    assert told["accuracy"] >= 0.95
    assert (told["workers"], told["killed"]) == (6, 1)
    assert told["staleness_mean"] > 1
    verified = CliRunner().invoke(main, ["verify", str(tmp_path / "demo" / "run"), "--json"])
    assert verified.exit_code == 0
    assert json.loads(verified.output)["x_sha256"] == told["x_sha256"]


@pytest.mark.slow
def test_the_comparison_holds_what_the_readme_says_of_it(tmp_path: Path) -> None:
    """FedAsync needs at most a tenth of FedAvg's time and half of the over-selected one's, as the table shows."""
    command = next(text for language, text in BLOCKS if language == "console" and "compare" in text).split()[1:]
    arguments = [*command[1:-1], str(ROOT / command[-1]), "--dir", str(tmp_path), "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    rows = {row["method"]: row for row in json.loads(result.stdout.splitlines()[-1])["rows"]}
    shown = {
        cells[0].split(",")[0].strip(): float(cells[1].split("±")[0].strip(" %")) / 100
        for cells in (line.strip("|").split("|") for line in README.splitlines() if "±" in line)
    }
    assert rows["FedAsync"]["metric"] == pytest.approx(shown["FedAsync"], abs=0.01)
    assert rows["FedAsync"]["reached_s"] < rows["FedAvg"]["reached_s"] / 10
    assert rows["FedAsync"]["reached_s"] < rows["FedAvg, 1.3 x selected"]["reached_s"] / 2


def _words(line: str) -> list[str]:
    return re.sub(r"[\d.,]+", "#", line).split()
