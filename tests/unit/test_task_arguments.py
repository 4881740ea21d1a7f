"""Arguments of the function that makes a task: from a flag, a file and Python, into the folder of the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from click.testing import CliRunner, Result

import offbeat
from offbeat.cli import main
from offbeat.cli.work import make
from offbeat.errors import InvalidValue
from offbeat.settings import Settings
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import read_json
from offbeat.task_arguments import parsed, task_arguments
from offbeat.worker.api_answers import Joined

TASK = """
import numpy as np
from offbeat import Trained

class Line:
    devices = 4

    def __init__(self, size: int = 3, slope: float = 1.0, upward: bool = True, label: str = "line", seed: int = 0):
        self.size, self.slope, self.upward, self.label = size, slope, upward, label

    def initial(self, seed):
        return {"x": np.zeros(self.size, np.float32)}

    def train(self, model, work):
        model["x"][:] += np.float32(self.slope if self.upward else -self.slope)
        return Trained(1, 1)

    def evaluate(self, model):
        return {"sum": float(model["x"].sum())}

task = Line()
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(TASK)
    return "line.py:Line"


def offbeat_(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environment)


def simulated(*arguments: str, **environment: str) -> dict[str, Any]:
    result = offbeat_("simulate", *arguments, "--epochs", "4", "--json", **environment)
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return summary


# --- what a function is given ----------------------------------------------------------------------------------------


def plain(  # type: ignore[no-untyped-def]
    size: int = 3,
    rate: float = 0.1,
    deep: bool = False,
    label: str = "a",
    folder: Path = Path(),
    untyped=7,
    maybe: int | None = None,
    older: Optional[float] = None,  # noqa: UP045
    odd: list[int] = [],  # noqa: B006
) -> None: ...


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("size=8", 8),
        ("rate=8", 8.0),
        ("rate=1e-3", 0.001),
        ("rate=inf", float("inf")),
        ("deep=true", True),
        ("deep=False", False),
        ("label=8", "8"),
        ("label=007", "007"),
        ("label=0.50", "0.50"),
        ("label=true", "true"),
        ("label=a=b", "a=b"),
        ("label=", ""),
        ("folder=data/here", Path("data/here")),
        ("untyped=9", 9),
        ("maybe=4", 4),
        ("older=4", 4.0),
        ("odd=4", 4),
    ],
)
def test_a_value_is_what_the_parameter_says(text: str, value: object) -> None:
    settings = Settings.of({"task_args": parsed([text])})
    assert Settings.of(json.loads(json.dumps(settings.as_dict()))) == settings
    (given,) = task_arguments("t", plain, settings, {}).values()
    assert given == value
    assert type(given) is type(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("size=big", "task argument size is 'big' but must be a whole number"),
        ("size=1.5", "size is 1.5 but must be a whole number"),
        ("size=true", "size is True but must be a whole number"),
        ("rate=fast", "rate is 'fast' but must be a number"),
        ("deep=1", "deep is 1 but must be true or false"),
        ("maybe=x", "maybe is 'x' but must be a whole number"),
        ("sise=8", "task t takes no argument 'sise'; it takes size, rate, deep, label, folder, untyped, maybe"),
        ("seed=8", "seed is a setting of its own, not a task argument; use --seed"),
        ("partition_sizes=8", "use --partition-sizes"),
        ("size", "'size' but must be NAME=VALUE"),
        ("1=2", "'1=2' but must be NAME=VALUE"),
    ],
)
def test_a_wrong_name_or_value_is_refused_with_what_is_allowed(text: str, said: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        task_arguments("t", plain, Settings.of({"task_args": parsed([text])}), {})
    assert said in str(refused.value)


def test_a_function_may_take_any_name_or_need_one() -> None:
    def anything(**more: object) -> None: ...

    def needy(devices: int, path: str) -> None: ...

    def nothing() -> None: ...

    def refused(function: Callable[..., None], said: str, **arguments: Any) -> None:
        with pytest.raises(InvalidValue, match=said):
            task_arguments("t", function, Settings(task_args=arguments), {"devices": 3})

    assert task_arguments("t", anything, Settings(task_args={"a": 1}), {}) == {"a": 1}
    assert task_arguments("t", needy, Settings(task_args={"path": "x"}), {"devices": 3}) == {"devices": 3, "path": "x"}
    refused(needy, "needs its argument 'path': give --task-arg path=VALUE")
    refused(nothing, "takes no argument 'a'; it takes none", a=1)


def test_the_same_argument_twice_is_refused() -> None:
    with pytest.raises(InvalidValue, match="size twice"):
        parsed(["size=1", "size=2"])
    with pytest.raises(InvalidValue, match="width is set twice, as a setting and as a task argument"):
        task_arguments("cifar10", lambda width: width, Settings(width=8, task_args={"width": 8}), {"width": 8})


@pytest.mark.parametrize("wrong", [3, ["width"], {"width": [1]}, {"width": None}, {3: 4}, {"width": float("nan")}])
def test_task_args_are_a_table_of_plain_values(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="task_args"):
        Settings.of({"task_args": wrong})


def test_settings_with_task_args_compare_and_hash() -> None:
    one, other = Settings(task_args={"a": 1, "b": True}), Settings.of({"task_args": {"b": True, "a": np.int64(1)}})
    assert one == other
    assert hash(one) == hash(other)
    assert Settings(task_args={}) == Settings()
    assert Settings().as_dict()["task_args"] is None


# --- from end to end -------------------------------------------------------------------------------------------------


def test_flags_the_environment_a_file_and_python_say_the_same(file: str) -> None:
    Path("s.toml").write_text("[task_args]\nsize = 5\nslope = 9.0\n")
    ways = [
        simulated(file, "--task-arg", "size=5", "--task-arg", "slope=2"),
        simulated(file, OFFBEAT_TASK_ARGS="size=5 slope=2"),
        simulated(file, "--settings", "s.toml", "--task-arg", "slope=2"),
        offbeat.simulate(file, epochs=4, task_args={"size": 5, "slope": 2}).summary,
    ]
    assert len({way["x_sha256"] for way in ways}) == 1
    assert all(way["settings"]["task_args"] == {"size": 5, "slope": 2} for way in ways)
    assert ways[0]["sum"] > 0 > simulated(file, "--task-arg", "upward=false")["sum"]


def test_mistakes_are_one_line(file: str) -> None:
    for text, said in (("sise=5", "it takes size, slope, upward, label"), ("size=x", "must be a whole number")):
        result = offbeat_("simulate", file, "--task-arg", text)
        assert (result.exit_code, said in result.stderr, result.stderr.count("\n")) == (2, True, 1)
    assert "does not take it" in offbeat_("simulate", "line.py", "--task-arg", "size=5").stderr
    with pytest.raises(InvalidValue, match="the task is made already"):
        offbeat.simulate(object(), task_args={"size": 5})  # type: ignore[arg-type]


def test_a_run_goes_on_only_with_the_same_task_args(file: str) -> None:
    """A folder from before there were task arguments is one without."""
    folder = Path("run")
    first = simulated(file, "--dir", str(folder))
    (folder / "summary.json").unlink()
    recorded = read_json(folder / "settings.json")
    assert recorded.pop("task_args") is None
    (folder / "settings.json").write_text(json.dumps(recorded))
    result = offbeat_("simulate", file, "--epochs", "4", "--dir", str(folder), "--task-arg", "size=5")
    assert result.exit_code == 2
    assert 'task_args is not set there and {"size": 5} here' in result.stderr
    assert simulated(file, "--dir", str(folder))["x_sha256"] == first["x_sha256"]


def test_task_args_reach_other_processes_and_comparisons(file: str) -> None:
    here = offbeat.simulate(file, epochs=4, task_args={"size": 5}, executor="inline").summary
    there = offbeat.simulate(file, epochs=4, task_args={"size": 5}, executor="processes:1").summary
    assert here["x_sha256"] == there["x_sha256"]
    Path("spec.toml").write_text(
        f'task = "{file}"\nmetric = "sum"\n[settings]\nepochs = 4\n[settings.task_args]\nsize = 5\n'
        "[methods.five]\n[methods.six]\ntask_args = {size = 6}\n"
    )
    found = offbeat.compare(Spec.read("spec.toml"), "out", processes=1, pictures=False)
    assert found.summaries["five"][0]["x_sha256"] == here["x_sha256"]
    assert found.summaries["six"][0]["sum"] == pytest.approx(here["sum"] * 6 / 5)


def test_a_worker_takes_the_servers_arguments_and_its_own(file: str) -> None:
    told = {"task_args": {"size": 5, "label": "theirs"}, "seed": 1}
    joined = Joined(*["x"] * len(Joined.__dataclass_fields__))  # type: ignore[arg-type]
    object.__setattr__(joined, "settings", told)
    task: Any = make(file, lambda _line: None, joined, {"label": "mine"})
    assert (task.size, task.label) == (5, "mine")


def test_old_flags_work_with_a_word_of_deprecation(file: str) -> None:
    Path("line.py").write_text(TASK.replace("size", "width"))
    result = offbeat_("simulate", file, "--width", "5", "--epochs", "4", "--json")
    assert result.exit_code == 0, result.output
    assert "--width is deprecated: use --task-arg width=5" in result.stderr
    assert json.loads(result.stdout.splitlines()[-1])["settings"]["width"] == 5
    new = simulated(file, "--task-arg", "width=5")
    assert new["x_sha256"] == json.loads(result.stdout.splitlines()[-1])["x_sha256"]
