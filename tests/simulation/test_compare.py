"""Comparisons: specs, lockstep, resumption, and what the table says."""

import json
from pathlib import Path

import pytest

import offbeat
from offbeat.errors import InvalidValue
from offbeat.sim.compare import Comparison, Spec, compare

TASK = """
import numpy as np
from offbeat import Trained


class Pull:
    devices = 6

    def initial(self, seed):
        return {"x": np.full(3, seed, np.float32)}

    def train(self, model, work):
        model["x"][:] = (model["x"] + np.float32(10)) / 2
        return Trained(samples=1, gradients=2)

    def evaluate(self, model):
        return {"x": float(model["x"][0])}


task = Pull()
"""
SPEC = """
task = "{task}"
seeds = [1, 2, 3]
metric = "x"
reach = "slow"

[settings]
device_model = "lognormal:1"
in_flight_max = 3

[methods.fast]
rule = "fedasync"
epochs = 30

[methods.slow]
rule = "fedavg:3"
epochs = 4
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "pull.py").write_text(TASK)
    path = tmp_path / "spec.toml"
    path.write_text(SPEC.format(task=tmp_path / "pull.py"))
    return path


def test_a_comparison_gives_the_runs_that_simulate_gives(spec: Path, tmp_path: Path) -> None:
    result = compare(Spec.read(spec), tmp_path / "out", processes=1)
    alone = offbeat.simulate(
        str(tmp_path / "pull.py"), device_model="lognormal:1", in_flight_max=3, epochs=30, seed=2, executor="inline"
    )
    assert result.summaries["fast"][1]["x_sha256"] == alone.summary["x_sha256"]
    fast, slow = result.rows()
    assert (fast.t, fast.gradients, slow.t, slow.gradients) == (30, 60, 4, 24)
    assert fast.reached_s is not None
    assert slow.reached_s is not None
    assert fast.reached_s < slow.reached_s == pytest.approx(slow.virtual_s)


def test_processes_change_nothing(spec: Path, tmp_path: Path) -> None:
    one = compare(Spec.read(spec), tmp_path / "one", processes=1).rows()
    two = compare(Spec.read(spec), tmp_path / "two", processes=2).rows()
    assert one == two


def test_an_interrupted_comparison_goes_on(spec: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = compare(Spec.read(spec), out, processes=1).rows()
    (out / "fast" / "seed-2" / "summary.json").unlink()
    untouched = (out / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns
    seen: list[tuple[float, int]] = []
    again = compare(Spec.read(spec), out, processes=1, on_progress=lambda done, total: seen.append((done, total)))
    assert again.rows() == whole
    assert [seen[0], seen[-1]] == [(5, 6), (6, 6)]
    assert (out / "fast" / "seed-1" / "summary.json").stat().st_mtime_ns == untouched


def test_runs_of_another_spec_are_not_taken_for_this_ones(spec: Path, tmp_path: Path) -> None:
    compare(Spec.read(spec), tmp_path / "out", processes=1)
    spec.write_text(spec.read_text().replace("epochs = 30", "epochs = 31"))
    with pytest.raises(InvalidValue, match=r"epochs = 30, not 31; choose another --dir"):
        compare(Spec.read(spec), tmp_path / "out", processes=1)


def test_an_unknown_metric_is_named(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text().replace('metric = "x"', 'metric = "y"'))
    with pytest.raises(InvalidValue, match="metric is 'y' but fast has x"):
        compare(Spec.read(spec), tmp_path / "out", processes=1)


def test_a_task_that_takes_a_seed_is_made_for_every_seed(spec: Path, tmp_path: Path) -> None:
    file = tmp_path / "pull.py"
    made = file.read_text().replace(
        "task = Pull()", "def task(seed=0):\n    made = Pull()\n    made.seed = seed\n    return made"
    )
    file.write_text(made.replace('return {"x": float(model["x"][0])}', 'return {"x": float(self.seed)}'))
    rows = [compare(Spec.read(spec), tmp_path / str(count), processes=count).rows() for count in (1, 2)]
    assert rows[0] == rows[1]
    assert rows[0][0].metric == 2.0


def test_a_grid_multiplies_the_methods(spec: Path) -> None:
    spec.write_text(spec.read_text() + "\n[grid]\nalpha = [0.3, 0.6]\nqueue_max = [2]\n".replace("reach", ""))
    spec.write_text(spec.read_text().replace('reach = "slow"\n', ""))
    methods = Spec.read(spec).methods
    assert list(methods)[:2] == ["fast alpha=0.3 queue_max=2", "fast alpha=0.6 queue_max=2"]
    assert methods["slow alpha=0.6 queue_max=2"]["alpha"] == 0.6


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("[methods.fast]", "[method.fast]"), "unknown key 'method'"),
        (("seeds = [1, 2, 3]", "seeds = []"), "seeds must be a list"),
        (('reach = "slow"', 'reach = "none"'), "reach is 'none'"),
        (("epochs = 30", "epoch = 30"), "did you mean epochs"),
        (('rule = "fedasync"', 'rule = "fedsync"'), "rule 'fedsync' is unknown"),
        (("seeds =", "seeds"), "is not TOML"),
        (("[methods.fast]", "[settings.methods]"), "unknown setting 'methods'"),
    ],
)
def test_a_malformed_spec_is_refused_in_one_line(spec: Path, change: tuple[str, str], said: str) -> None:
    spec.write_text(spec.read_text().replace(*change))
    with pytest.raises(InvalidValue, match=said) as error:
        Spec.read(spec)
    assert "\n" not in str(error.value)


def test_the_spec_that_ships_is_sound() -> None:
    spec = Spec.read(Path(__file__).parents[2] / "examples" / "compare_digits.toml")
    assert spec.reach == "FedAvg"
    assert len(spec.seeds) == 5
    assert {settings["in_flight_max"] for settings in spec.methods.values()} == {32}


def test_lower_may_be_better(spec: Path, tmp_path: Path) -> None:
    spec.write_text(spec.read_text().replace('metric = "x"', 'metric = "x"\nlower_is_better = true'))
    result = compare(Spec.read(spec), tmp_path / "out", processes=1)
    assert [row.reached_s for row in result.rows()] == [0.0, 0.0]  # x rises, so x_0 is the lowest
    again = Comparison.read(result.spec, tmp_path / "out")
    assert json.dumps(again.rows()) == json.dumps(result.rows())
