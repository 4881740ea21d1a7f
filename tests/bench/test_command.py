"""`python -m benchmarks` as a command: what it prints, what it writes, and when it fails; nothing is measured here."""

import json
from pathlib import Path
from typing import Any

import benchmarks.run
import pytest
from benchmarks.__main__ import main
from benchmarks.machine import Machine
from benchmarks.results import Results
from benchmarks.run import Bench
from click.testing import CliRunner


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was asked for; the answer is the same each time."""
    calls: list[Any] = []

    def answer(parts: list[str], scale: Any, folder: Path, **options: Any) -> Bench:
        calls.append((parts, scale, folder, options["peers"]))
        results = Results(parts)
        if "startup" in parts:
            results.put("startup_help", 0.2)
        if "net" in parts:
            results.put("net_100mb_memory", 250.0)
        for part in parts:
            results.close(part)
        return Bench(results, Machine().facts())

    monkeypatch.setattr(benchmarks.run, "bench", answer)
    return calls


def test_all_is_every_part_and_the_last_line_is_json(asked: list[Any], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["--json", "--dir", str(tmp_path), "--peers"])
    assert done.exit_code == 0, done.output
    assert [(call[0], call[2], call[3]) for call in asked] == [(["kernel", "sim", "net", "startup"], tmp_path, True)]
    found = json.loads(done.output.splitlines()[-1])
    assert (found["startup_help"]["value"], found["startup_help"]["met"]) == (0.2, True)
    assert found["net_10mb_flower"]["why_not"] == "a peer, and --peers was not given"


def test_memory_is_recorded(asked: list[Any], tmp_path: Path) -> None:
    ratios = tmp_path / "ratios.json"
    assert CliRunner().invoke(main, ["net", "--record", str(ratios)]).exit_code == 0
    assert asked[0][0] == ["net"]
    assert json.loads(ratios.read_text()) == {"net_100mb_memory": 4.0}


def test_tables_and_ratios_are_written(asked: list[Any], tmp_path: Path) -> None:
    table, ratios = tmp_path / "table.md", tmp_path / "ratios.json"
    options = ["--markdown", str(table), "--record", str(ratios), "--quick"]
    done = CliRunner().invoke(main, ["startup", *options])
    assert done.exit_code == 0, done.output
    assert asked[0][0] == ["startup"]
    assert "| offbeat --help | 0.2 s |" in table.read_text()
    assert json.loads(ratios.read_text()) == {}, "seconds alone say nothing on another day"


@pytest.mark.parametrize(("recorded", "status"), [(2.9, 0), (3.1, 1)])
def test_half_of_what_was_recorded_is_a_failure(asked: list[Any], tmp_path: Path, recorded: float, status: int) -> None:
    before = tmp_path / "recorded.json"
    before.write_text(json.dumps({"startup_help": recorded, "kernel_one_1e6": 1.0}))
    done = CliRunner().invoke(main, ["startup", "--against", str(before)])
    assert asked
    assert done.exit_code == status
    assert ("less than half of the recorded" in done.output) is (status == 1)


def test_a_record_that_is_not_there_is_a_line_and_nothing_is_measured(asked: list[Any], tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["startup", "--against", str(tmp_path / "gone.json")])
    assert done.exit_code == 2
    assert "gone.json" in done.output
    assert asked == []


def test_an_extra_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def gone(_name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(benchmarks.run, "import_module", gone)
    done = CliRunner().invoke(main, ["sim", "--quick", "--dir", str(tmp_path)])
    assert done.exit_code == 2
    assert "pip install 'offbeat[torch]'" in done.output


@pytest.mark.parametrize("text", ['{"startup_help": "fast"}', '{"startup_help": null}', "[1, 2]"])
def test_what_holds_no_ratios_is_refused_before_anything_is_measured(
    asked: list[Any], tmp_path: Path, text: str
) -> None:
    (tmp_path / "recorded.json").write_text(text)
    done = CliRunner().invoke(main, ["startup", "--against", str(tmp_path / "recorded.json")])
    assert done.exit_code == 2, done.output
    assert "recorded.json" in done.output
    assert asked == []
