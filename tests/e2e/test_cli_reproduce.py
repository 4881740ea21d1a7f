"""`offbeat reproduce` as a user calls it; what needs the real data says so when it skips."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.data import cache_folder

DATA = (cache_folder() / "cifar-10-batches-bin" / "data_batch_1.bin").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cifar"], "unknown target 'cifar'; use one of cifar-k4, cifar-k16"),
        (["clock", "--scale", "huge"], "unknown scale 'huge'; use one of smoke, laptop, paper"),
        (["clock", "--as", "me"], "'me' is not one of 'text', 'authors'"),
    ],
)
def test_wrong_input_is_one_line_and_leaves_nothing(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["reproduce", *arguments])
    assert result.exit_code == 2
    assert said in result.stderr
    assert not list(tmp_path.iterdir())


def test_without_data_and_network_it_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFBEAT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("OFFBEAT_CIFAR10_URL", (tmp_path / "nowhere.tar.gz").as_uri())
    result = CliRunner().invoke(main, ["reproduce", "clock", "--scale", "smoke", "--processes", "1"])
    assert result.exit_code == 2
    assert "cifar-10-binary.tar.gz" in result.stderr
    assert str(tmp_path / "data") in result.stderr
    assert "runs failed" not in result.stderr, "it is said before the first run begins"


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="needs CIFAR-10 in OFFBEAT_DATA, or in the cache folder")
def test_a_small_figure_from_the_real_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["reproduce", "skewed", "--scale", "smoke", "--dir", "out", "--json"]
    result = CliRunner().invoke(main, arguments, env=dict(os.environ))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["curves"][0]["label"] == "FedAvg, k 10"
    assert {row["gradients"] for row in summary["curves"]} == {200}, "equal gradients"
    assert all(0.05 < row["mean"] < 0.6 for row in summary["curves"])
    folder = tmp_path / "out" / "smoke-text"
    assert {file.name for file in folder.iterdir()} >= {
        "skewed.png",
        "skewed.svg",
        "skewed.csv",
        "skewed.json",
        "curves",
    }
