"""`offbeat simulate`, `compare` and `export` as a user calls them."""

import csv
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from offbeat.cli import main
from offbeat.settings import Settings

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("sklearn", reason="scikit-learn is not installed")


def offbeat(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def simulated(*arguments: str, **environment: str) -> dict[str, Any]:
    result = offbeat("simulate", "digits", "--json", *arguments, **environment)
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_json_has_the_promised_names() -> None:
    promised = "t epochs applied gradients virtual_s wall_s staleness_mean staleness_largest accuracy x_sha256 executor"
    answer = simulated("--epochs", "30", "--seed", "3")
    assert {*promised.split(), "dir", "settings"} <= answer.keys()
    assert (answer["t"], answer["epochs"], answer["applied"], answer["gradients"]) == (30, 30, 30, 300)
    assert answer["settings"]["seed"] == 3
    assert answer["settings"]["devices"] == 100


def test_every_setting_is_a_flag_and_an_environment_variable(tmp_path: Path) -> None:
    help_text = offbeat("simulate", "--help").stdout
    for name in Settings.names():
        assert f"--{name.replace('_', '-')}" in help_text
    file = tmp_path / "settings.toml"
    file.write_text('alpha = 0.3\nseed = 7\nepochs = 9\nstaleness_fn = "constant"\n')
    settings = simulated("--settings", str(file), "--seed", "8", OFFBEAT_ALPHA="0.4")["settings"]
    assert (settings["alpha"], settings["seed"], settings["epochs"]) == (0.4, 8, 9)
    assert settings["staleness_fn"] == "constant"


def test_a_run_keeps_its_folder_and_exports_its_ledger(tmp_path: Path) -> None:
    run = tmp_path / "run"
    answer = simulated("--epochs", "20", "--dir", str(run))
    assert answer["dir"] == str(run)
    assert {"settings.json", "ledger.sqlite", "metrics.csv", "summary.json", "run.png", "run.svg"} <= {
        path.name for path in run.iterdir()
    }
    assert offbeat("export", str(run), "--ledger", str(tmp_path / "out.csv")).exit_code == 0
    with (tmp_path / "out.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["kind"] == "decided"]
    assert [int(row["t"]) for row in rows] == list(range(1, 21))
    again = offbeat("simulate", "digits", "--epochs", "20", "--dir", str(run))
    assert again.exit_code == 2
    assert len(again.stderr.splitlines()) <= 2


def test_a_task_of_your_own_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np, torch, offbeat\n"
        "def make(devices=5, seed=0):\n"
        "    rng = np.random.default_rng(seed)\n"
        "    x = rng.normal(size=(200, 4)); y = (x.sum(1) > 0).astype(int)\n"
        "    return offbeat.torch.Task(lambda: torch.nn.Linear(4, 2), torch.nn.functional.cross_entropy,\n"
        "        [(x[i::devices], y[i::devices]) for i in range(devices)], (x, y), gamma=0.5)\n"
        "task = make()\n"
    )
    for spec, devices in ((str(file), 5), (f"{file}:make", 8)):
        result = offbeat("simulate", spec, "--epochs", "60", "--devices", str(devices), "--json")
        assert result.exit_code == 0, result.output
        answer = json.loads(result.stdout.splitlines()[-1])
        assert answer["accuracy"] > 0.8
        assert answer["settings"]["devices"] == devices


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "nothing"], "unknown task 'nothing'; use digits, cifar10, wikitext2 or a file"),
        (["simulate", "missing.py"], "there is no file missing.py"),
        (["simulate", "digits", "--rule", "fedsgd"], "rule 'fedsgd' is unknown; did you mean sgd? use fedasync"),
        (["simulate", "digits", "--device-model", "sampled:0"], "K in sampled:K must be a whole number >= 1"),
        (["simulate", "digits", "--alpha", "7"], "alpha is 7.0 but must lie in (0, 1]"),
        (["simulate", "digits", "--devices", "5000"], "1..1437 devices"),
        (["simulate", "digits", "--partition", "shards:x"], "shards:S"),
        (["simulate", "digits", "--dir", "/dev/null/x"], "cannot write"),
        (["simulate", "digits", "--settings", "missing.toml"], "cannot read missing.toml"),
        (["compare", "missing.toml"], "cannot read missing.toml"),
        (["export", "nowhere", "--ledger", "x.csv"], "nowhere"),
    ],
)
def test_wrong_input_is_one_line_exit_status_2_and_no_traceback(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = offbeat(*arguments)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_compare_prints_a_table_and_writes_csv_and_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    spec = tmp_path / "small.toml"
    spec.write_text(
        'seeds = [1, 2]\nreach = "Avg"\n[settings]\ndevices = 12\nin_flight_max = 4\n'
        '[methods.Async]\nrule = "fedasync"\nepochs = 40\n[methods.Avg]\nrule = "fedavg:4"\nepochs = 4\n'
    )
    result = offbeat("compare", str(spec), "--dir", str(tmp_path / "out"), "--processes", "1", "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout.splitlines()[-1])["rows"]
    assert [row["method"] for row in rows] == ["Async", "Avg"]
    assert "Avg's final accuracy after" in result.stdout
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert "comparison.csv" in names
    assert {
        f"accuracy-{axis}.{end}" for axis in ("gradients", "epochs", "virtual-time", "bytes") for end in ("png", "svg")
    } <= names


def test_a_run_that_is_stopped_goes_on_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    """SIGTERM, in a process of its own, once the run's ledger is there."""
    command = [
        sys.executable,
        "-m",
        "offbeat",
        "simulate",
        "digits",
        "--epochs",
        "600",
        "--executor",
        "inline",
        "--json",
    ]
    process = subprocess.Popen([*command, "--dir", str(tmp_path / "run")], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()  # it says what it will do once it is set up
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode in (130, -signal.SIGTERM), said  # the signal may come before the handler is there
    if process.returncode == 130:
        assert "the same command goes on from there" in said
    whole = simulated("--epochs", "600", "--executor", "inline")
    resumed = simulated("--epochs", "600", "--executor", "inline", "--dir", str(tmp_path / "run"))
    assert resumed["x_sha256"] == whole["x_sha256"]


def test_what_goes_wrong_in_a_task_is_one_line_that_says_where(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(
        "import numpy as np\n"
        "class Broken:\n"
        "    def initial(self, seed): return {'x': np.zeros(2, np.float32)}\n"
        "    def train(self, model, work): raise ValueError('no luck')\n"
        "    def evaluate(self, model): return {}\n"
        "task = Broken()\n"
    )
    result = offbeat("simulate", str(file), "--epochs", "3")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "Error: ValueError: no luck (broken.py:4)"
