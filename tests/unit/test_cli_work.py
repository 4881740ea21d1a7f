"""`offbeat work` around the worker: its folder, its task, its exit status."""

from importlib import import_module
from pathlib import Path

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.cli.work import make, outbox_of
from offbeat.cli.work import work as command
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.worker.api_answers import Joined, RequestRefused
from offbeat.worker.loop import GaveUp
from offbeat.worker.settings import WorkerSettings

module = import_module("offbeat.cli.work")  # in its package, that name is the command
SERVER = "http://127.0.0.1:7733"
TASK = """
import offbeat

class Task:
    warm_up = "0,1,0.1"
    def __init__(self, seed, gamma=0.1):
        self.seed, self.gamma = seed, gamma
    def with_settings(self, **changes):
        made = Task(self.seed, changes.get("gamma", self.gamma))
        made.warm_up = changes.get("warm_up", self.warm_up)
        return made
    def initial(self, seed): ...
    def train(self, model, work): ...
    def evaluate(self, model): ...

task = Task
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OFFBEAT_TOKEN", raising=False)


def joined(task: str, **settings: object) -> Joined:
    return Joined(5, "5-a", 2, "r1", 1, task, dict(settings), "abc", 25.0, 60.0, "idle")


def test_workers_on_one_machine_have_folders_of_their_own() -> None:
    settings = WorkerSettings(server=SERVER)
    with outbox_of(settings) as first, outbox_of(settings) as second:
        assert [str(outbox.path) for outbox in (first, second)] == [
            *(".offbeat-work/127.0.0.1-7733-0", ".offbeat-work/127.0.0.1-7733-1")
        ]
        first.close()
        with outbox_of(settings) as third:
            assert (third.path, third.name) == (first.path, first.name)


def test_a_name_or_a_device_has_a_folder_of_its_own() -> None:
    with outbox_of(WorkerSettings(server=SERVER, device=3)) as outbox:
        assert outbox.path == Path(".offbeat-work/127.0.0.1-7733-device-3")
        with pytest.raises(InvalidValue, match="give it with --dir"):
            outbox_of(WorkerSettings(server=SERVER, device=3))
    with outbox_of(WorkerSettings(server="http://[::1]:1", name="a/b")) as outbox:
        assert (str(outbox.path), outbox.name) == (".offbeat-work/__1-1-a%2Fb", "a/b")
    with outbox_of(WorkerSettings(server=SERVER, name="w", folder=Path("here"))) as outbox:
        assert (str(outbox.path), outbox.name) == ("here", "w")


def test_the_task_is_made_with_the_settings_of_the_server_and_without_its_warm_up() -> None:
    Path("file.py").write_text(TASK)
    lines: list[str] = []
    task = make("file.py", lines.append, joined("another.py:task abc", seed=7, gamma=0.5, warm_up="0,5,0.1"))
    assert vars(task) == {"seed": 7, "gamma": 0.5, "warm_up": None}
    assert len(lines) == 1
    assert "that of the server another.py:task abc; going on" in lines[0]


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (GaveUp("5 trainings in a row failed"), 1, "Error: 5 trainings in a row failed"),
        (OffbeatError("no"), 2, "Error: no"),
        (RequestRefused(401, "bad_token", "not known", "Do."), 2, "Error: not known; give it with --token"),
        (RequestRefused(426, "wrong_version", "other version", "Install."), 2, "Error: other version. Install."),
    ],
)
def test_how_it_ends(monkeypatch: pytest.MonkeyPatch, error: OffbeatError, status: int, says: str) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, "_work", fail)
    done = CliRunner().invoke(main, ["work", "digits", "--server", SERVER])
    assert done.exit_code == status
    assert done.output.startswith(says)


@pytest.mark.parametrize(
    "flags",
    [
        ["--server", "ftp://x"],
        ["--server", "http://fl.example", "--token", "t"],
        ["--server", SERVER, "--only-when", "sunny"],
        ["--server", SERVER, "--gate", "no-such-program"],
        ["--server", SERVER, "--nice", "99"],
        ["--server", SERVER, "--token-file", "nothing"],
        ["--server", "https://fl.example", "--ca", "nothing"],
        [],
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(flags: list[str]) -> None:
    done = CliRunner().invoke(main, ["work", "digits", *flags])
    assert done.exit_code == 2
    assert "Error: " in done.output
    assert not Path(".offbeat-work").exists()


def test_every_setting_of_a_worker_has_a_flag() -> None:
    flags = {parameter.name for parameter in command.params}
    own = set(WorkerSettings.__slots__) - {"timeouts", "eligible_every_s", "stop_s"}
    assert own <= flags
