"""Specs: what a file may say, and that everything else is refused in one line."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import InvalidValue
from offbeat.sim.compare import compare
from offbeat.sim.spec import Spec
from tests.simulation.comparing import change, written

FAST = "[methods.fast]"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return written(tmp_path)


def refused(spec: Path) -> str:
    with pytest.raises(InvalidValue) as error:
        Spec.read(spec)
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(str(spec)) or "is not TOML" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (FAST, "[method.fast]", "unknown key 'method'"),
        ("seeds =", "seeds", "is not TOML"),
        ("seeds = [1, 2, 3]", "seeds = []", "seeds must be a list of whole numbers >= 0"),
        ("seeds = [1, 2, 3]", "seeds = 3", "seeds must be a list"),
        ("seeds = [1, 2, 3]", "seeds = [1, true]", "seeds must be a list"),
        ("seeds = [1, 2, 3]", "seeds = [1, -2]", "seeds must be a list"),
        ("seeds = [1, 2, 3]", "seeds = [1, 2.0]", "seeds must be a list"),
        ("seeds = [1, 2, 3]", "seeds = [1, 2, 1]", "seeds holds 1 more than once"),
        ('reach = "slow"', 'reach = "none"', "reach is 'none' but must be one of fast, slow"),
        ('reach = "slow"', "reach = 3", "reach is 3 but must be one of fast, slow"),
        ('reach = "slow"', "reach = [1]", "reach is [1] but must be one of fast, slow"),
        ('metric = "x"', "metric = 3", "metric is 3 but must be the name of a metric"),
        ('metric = "x"', 'lower_is_better = "x"', "lower_is_better is 'x' but must be true or false"),
        ('metric = "x"', "settings = 3", "settings is 3 but must be a table: write [settings]"),
        ('metric = "x"', "grid = 3", "grid is 3 but must be a table: write [grid]"),
        ("[methods.slow]", "[grid]\nalpha = 0.3\n[methods.slow]", "[grid] alpha is 0.3 but must be a list of values"),
        ("[methods.slow]", "[grid]\nalpha = []\n[methods.slow]", "[grid] alpha is [] but must be a list of values"),
        ("[methods.slow]", "[grid]\nseed = [1, 2]\n[methods.slow]", "seed is set for method 'fast seed=1'"),
        ("epochs = 30", "epoch = 30", "method 'fast': unknown setting 'epoch'; did you mean epochs"),
        ("epochs = 30", "seed = 30", "write seeds = [30] beside task"),
        ('rule = "fedasync"', 'rule = "fedsync"', "method 'fast': rule 'fedsync' is unknown"),
        (FAST, "[settings.methods]", "unknown setting 'methods'"),
        (FAST, '[methods.".."]', "method '..' cannot be the name of a folder"),
        (FAST, '[methods.""]', "method '' cannot be the name of a folder"),
        (FAST, f"[methods.{'x' * 300}]", "cannot be the name of a folder"),
        (FAST, '[methods."a b"]\n[methods."a-b"]', "methods 'a b' and 'a-b' would share the folder a-b; rename one"),
    ],
)
def test_a_malformed_spec_is_refused_in_one_line(spec: Path, old: str, new: str, said: str) -> None:
    if new.startswith("settings ="):
        change(spec, ("[settings]\n", ""), ('device_model = "lognormal:1"\nin_flight_max = 3\n', ""))
    change(spec, (old, new))
    assert said in refused(spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("task = 5\n[methods.a]\n", "task is 5 but must be text: digits, or a file"),
        ("methods = 3\n", "methods is 3 but must be a table"),
        ("[methods]\n", "there is no method; write a table [methods.NAME]"),
        ("seeds = [1]\n", "there is no method"),
        ("[methods]\na = 3\n", "methods.a is 3 but must be a table"),
    ],
)
def test_what_a_spec_cannot_do_without(spec: Path, text: str, said: str) -> None:
    spec.write_text(text)
    assert said in refused(spec)


def test_a_grid_multiplies_the_methods(spec: Path) -> None:
    change(spec, ('reach = "slow"\n', ""), (FAST, f"[grid]\nalpha = [0.3, 0.6]\nqueue_max = [2]\n{FAST}"))
    methods = Spec.read(spec).methods
    assert list(methods)[:2] == ["fast alpha=0.3 queue_max=2", "fast alpha=0.6 queue_max=2"]
    assert methods["slow alpha=0.6 queue_max=2"]["alpha"] == 0.6


def test_a_grid_wins_over_the_common_settings_and_does_not_lose_to_a_method(spec: Path) -> None:
    change(spec, ('reach = "slow"\n', ""), (FAST, f"[grid]\nin_flight_max = [2]\n{FAST}"))
    assert {method["in_flight_max"] for method in Spec.read(spec).methods.values()} == {2}
    change(spec, ("[methods.slow]\n", "[methods.slow]\nin_flight_max = 4\n"))
    assert "in_flight_max is set by [grid] and by [methods.slow]; leave it out of one of them" in refused(spec)


def test_a_value_that_is_twice_in_a_grid_is_refused(spec: Path) -> None:
    change(spec, ('reach = "slow"\n', ""), (FAST, f"[grid]\nalpha = [0.3, 0.3]\n{FAST}"))
    assert "would share the folder fast-alpha=0.3" in refused(spec)


@pytest.mark.parametrize(
    "changed",
    [
        {"task": 5},
        {"seeds": (1, 1)},
        {"seeds": "12"},
        {"metric": None},
        {"reach": "b"},
        {"lower_is_better": 1},
        {"methods": {}},
        {"methods": {"a": 3}},
        {"methods": {"a b": {}, "a-b": {}}},
        {"methods": {"a": {"epoch": 3}}},
        {"methods": {3: {}}},
    ],
)
def test_a_spec_that_is_made_in_python_is_checked_as_well(changed: dict[str, Any]) -> None:
    sound: dict[str, Any] = {"task": "digits", "seeds": (1, 2), "methods": {"a": {"epochs": 3}}, "reach": "a"}
    Spec(**sound)
    with pytest.raises(InvalidValue):
        Spec(**sound | changed)


def test_a_spec_is_read_where_its_path_is_given(spec: Path, tmp_path: Path) -> None:
    assert Spec.read(str(spec)) == Spec.read(spec)
    assert compare(spec, tmp_path / "out", processes=1, pictures=False).spec == Spec.read(spec)


def test_every_run_has_a_folder_of_its_own(spec: Path, tmp_path: Path) -> None:
    entries = Spec.read(spec).entries(tmp_path)
    assert [entry.settings.seed for entry in entries] == [1, 2, 3, 1, 2, 3]
    assert entries[4].folder == tmp_path / "slow" / "seed-2"
    assert len({entry.folder for entry in entries}) == 6


def test_the_spec_that_ships_is_sound() -> None:
    spec = Spec.read(Path(__file__).parents[2] / "examples" / "compare_digits.toml")
    assert spec.reach == "FedAvg"
    assert len(spec.seeds) == 5
    assert {settings["in_flight_max"] for settings in spec.methods.values()} == {32}


def test_under_a_grid_each_is_measured_against_its_own_combination(spec: Path) -> None:
    spec.write_text(spec.read_text() + "\n[grid]\nalpha = [0.3, 0.6]\n")
    read = Spec.read(spec)
    assert read.reach == "slow"
    assert [read.reference(name) for name in read.methods] == ["slow alpha=0.3", "slow alpha=0.6"] * 2
