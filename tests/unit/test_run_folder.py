"""The folder of a run: begun once, resumed only by its own settings, written by one process, read by any."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from math import inf, nan
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from offbeat.core.layout import Model
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.protocol.messages import VersionPublished
from offbeat.storage import run_folder
from offbeat.storage.json_file import DIGEST, plain, read_json, write_json
from offbeat.storage.model_file import save_models
from offbeat.storage.run_folder import FINAL, RunFolder

SETTINGS: dict[str, object] = {"rule": "fedasync", "alpha": 0.6, "seed": 1, "until_s": inf, "range": (1, 2)}
X = Model.of({"w": np.arange(3, dtype=np.float32)})


def files(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def finished(path: Path) -> Path:
    with RunFolder.begin(path, SETTINGS) as folder:
        folder.finish({"t": 3}, X)
    return path


def interrupted(path: Path) -> Path:
    RunFolder.begin(path, SETTINGS).close()
    return path


# --- beginning -------------------------------------------------------------------------------------------------------


def test_a_new_folder_is_made_with_its_parents(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "a" / "b", SETTINGS) as folder:
        assert not folder.resumed
        assert folder.state == "running"
        assert folder.settings == plain(SETTINGS)
        assert files(folder.path) == [".lock", "settings.json"]
        assert folder.summary is None
    assert files(tmp_path / "a" / "b") == ["settings.json"]
    assert read_json(tmp_path / "a" / "b" / "settings.json") == SETTINGS | {"until_s": "inf", "range": [1, 2]}


def test_an_empty_folder_is_used(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        assert not folder.resumed


def test_a_folder_that_a_dying_process_had_just_begun_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("9" * 12)
    (tmp_path / "settings.json.4711.aside").write_text('{"rule": "fe')
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        assert not folder.resumed
        assert files(tmp_path) == [".lock", "settings.json"]
        assert (tmp_path / ".lock").read_text() == str(os.getpid())


def test_an_interrupted_run_with_the_same_settings_goes_on(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "run", SETTINGS) as folder:
        folder.ledger().record(VersionPublished(1.0, 1), [])
        save_models(folder.checkpoint_path, {"x": X}, {})
    (tmp_path / "run" / "checkpoint.safetensors.4711.aside").touch()
    (tmp_path / "run" / "plot.png").touch()
    with RunFolder.begin(tmp_path / "run", dict(reversed(SETTINGS.items())) | {"gamma": None}) as folder:
        assert folder.resumed
        assert folder.state == "running"
        assert folder.checkpoint_path.exists()
        ledger = folder.ledger()
        assert ledger is folder.ledger()
        ledger.record(VersionPublished(2.0, 2), [])
        assert [row.t for row in ledger.rows()] == [1, 2]
    assert files(tmp_path / "run") == ["checkpoint.safetensors", "ledger.sqlite", "plot.png", "settings.json"]


def test_other_settings_are_refused_and_named(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "run")
    other = {name: value for name, value in SETTINGS.items() if name != "until_s"}
    with pytest.raises(InvalidValue) as refused:
        RunFolder.begin(path, other | {"alpha": 0.3, "trace": "x" * 100})
    message = str(refused.value)
    assert "alpha is 0.6 there and 0.3 here" in message
    assert 'until_s is "inf" there and not set here' in message
    assert "trace is not set there and" in message
    assert "x" * 60 not in message
    assert "seed" not in message
    assert "rule" not in message
    assert "same settings to resume" in message
    assert "\n" not in message
    assert files(path) == ["settings.json"]


def test_a_finished_run_is_refused(tmp_path: Path) -> None:
    path = finished(tmp_path / "run")
    before = files(path)
    for settings in (SETTINGS, SETTINGS | {"alpha": 0.1}):
        with pytest.raises(InvalidValue, match="holds a finished run; give a new or an empty folder"):
            RunFolder.begin(path, settings)
    assert files(path) == before


def test_a_folder_with_other_files_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    for name in ("a.txt", "summary.json", "b", "c"):
        (tmp_path / name).touch()
    with pytest.raises(InvalidValue, match=r"other files \(a.txt, b, c and 1 more\); give a new or an empty folder"):
        RunFolder.begin(tmp_path, SETTINGS)
    assert files(tmp_path) == ["a.txt", "b", "c", "summary.json"]


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValue, match="is a file; give a new or an empty folder"):
        RunFolder.begin(tmp_path / "file", SETTINGS)


@pytest.mark.parametrize("content", ["", "[1]", '{"rule": '])
def test_settings_that_cannot_be_read_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(InvalidValue, match=r"settings.json.*must be a JSON object"):
        RunFolder.begin(tmp_path, SETTINGS)
    assert files(tmp_path) == ["settings.json"]


@pytest.mark.parametrize("name", ["file/run", "file/a/b/run", "new/" + "x" * 300])
def test_where_no_folder_can_be_nothing_is_left(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OffbeatError, match="cannot write") as refused:
        RunFolder.begin(tmp_path / name, SETTINGS)
    assert "\n" not in str(refused.value)
    assert files(tmp_path) == ["file"]


def test_settings_that_are_not_json_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"settings.schedule\[1\] is .* cannot be written as JSON"):
        RunFolder.begin(tmp_path / "a" / "b", {"schedule": [1, object()]})
    assert files(tmp_path) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_beginning_that_fails_half_way_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(_path: Path, _value: object) -> None:
        raise error

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(run_folder, "write_json", fails)
    for name in ("there", "a/b/c"):
        with pytest.raises((OffbeatError, KeyboardInterrupt)):
            RunFolder.begin(tmp_path / name, SETTINGS)
    assert files(tmp_path) == ["there"]
    assert files(tmp_path / "there") == []


# --- one process writes ----------------------------------------------------------------------------------------------

HOLDER = """
import os, sys
from pathlib import Path
from offbeat.protocol.messages import VersionPublished
from offbeat.storage.run_folder import RunFolder
folder = RunFolder.begin(Path(sys.argv[1]), {"seed": 1})
folder.ledger().record(VersionPublished(1.0, 1), [])
folder.ledger().flush()
print("begun", flush=True)
sys.stdin.readline()
os._exit(9)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes the run, until it is told to die without a word."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert _piped(process.stdout).readline() == "begun\n"
        yield process


def _piped(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def test_two_processes_cannot_write_one_run(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / "run"
    with pytest.raises(InvalidValue, match=f"is being written by process {holder.pid}; wait for it") as refused:
        RunFolder.begin(path, {"seed": 1})
    assert "\n" not in str(refused.value)
    assert RunFolder.open(path).state == "running"
    with RunFolder.open(path).ledger() as ledger:
        assert ledger.count() == 1
    holder.communicate("die\n")
    assert holder.returncode == 9
    assert RunFolder.open(path).state == "interrupted"
    with RunFolder.begin(path, {"seed": 1}) as folder:
        assert folder.resumed
        assert (path / ".lock").read_text() == str(os.getpid())
        assert folder.ledger().count() == 1


def test_one_process_begins_a_run_once_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder.begin(tmp_path, SETTINGS),
        pytest.raises(InvalidValue, match=f"is being written by process {os.getpid()}"),
    ):
        RunFolder.begin(tmp_path, SETTINGS)
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        assert folder.resumed


def test_whoever_looks_at_the_lock_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "run")
    with (path / ".lock").open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert RunFolder.open(path).state == "interrupted"
        with pytest.raises(InvalidValue, match="is being written by another process"):
            RunFolder.begin(path, SETTINGS)
    RunFolder.begin(path, SETTINGS).close()


def test_closing_twice_does_nothing_and_leaves_others_their_lock(tmp_path: Path) -> None:
    first = RunFolder.begin(tmp_path, SETTINGS)
    first.close()
    with RunFolder.begin(tmp_path, SETTINGS) as second:
        first.close()
        assert second.state == RunFolder.open(tmp_path).state == "running"


# --- reading and finishing -------------------------------------------------------------------------------------------


def test_a_finished_run_can_be_read(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path / "run", SETTINGS) as folder:
        folder.ledger().record(VersionPublished(1.0, 1), [])
        reader = RunFolder.open(tmp_path / "run")
        assert (reader.state, reader.summary) == ("running", None)
        with pytest.raises(InvalidValue, match=r"there is no model file .*x.safetensors"):
            reader.model(X.layout)
        folder.finish({"t": 3, "loss": nan, "accuracy": np.float32(0.5)}, X)
        assert folder.state == reader.state == "finished"
        with reader.ledger() as ledger:  # flushed before the run was called finished
            assert ledger.count() == 1
    assert reader.settings == plain(SETTINGS)
    assert reader.summary == {
        "t": 3,
        "loss": "nan",
        "accuracy": 0.5,
        "file_sha256": digest_of_file(reader.path / FINAL),
    }
    assert reader.model(X.layout).vector.tobytes() == X.vector.tobytes()
    assert files(reader.path) == ["ledger.sqlite", "settings.json", "summary.json", "x.safetensors"]


def test_reading_changes_nothing(tmp_path: Path) -> None:
    path = interrupted(tmp_path / "run")
    with RunFolder.open(path) as reader:
        assert reader.state == "interrupted"
        with pytest.raises(InvalidValue, match="there is no ledger"):
            reader.ledger()
        with pytest.raises(InvalidValue, match="opened for reading"):
            reader.finish({}, X)
    assert files(path) == ["settings.json"]


def test_a_run_is_not_called_finished_before_its_model_is_there(tmp_path: Path) -> None:
    with RunFolder.begin(tmp_path, SETTINGS) as folder:
        (tmp_path / "x.safetensors").mkdir()  # so that the model cannot be written
        with pytest.raises(OffbeatError, match="cannot write"):
            folder.finish({"t": 3}, X)
        with pytest.raises(InvalidValue, match=r"summary\.loss is"):
            folder.finish({"loss": object()}, X)
        assert folder.state == "running"
    assert files(tmp_path) == ["settings.json", "x.safetensors"]


@pytest.mark.parametrize("name", ["nowhere", "file", "file/below", "x" * 300, "."])
def test_what_is_no_run_cannot_be_opened(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidValue, match="is not the folder of a run") as refused:
        RunFolder.open(tmp_path / name)
    assert "\n" not in str(refused.value)


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [{}, {"a": {"b": [1, 2.5, None, True, "é\n"]}}, {"x": 0.1 + 0.2}, {"x": 10**30}, {"x": 5e-324}]
)
def test_json_reads_back(tmp_path: Path, value: dict[str, Any]) -> None:
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert files(tmp_path) == ["a.json"]


def test_json_is_what_any_reader_reads(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [nan, inf, -inf], "b": np.float64(nan), "c": Path("d"), "e": np.bool_(True)})
    found = json.loads((tmp_path / "a.json").read_text(), parse_constant=lambda name: pytest.fail(name))
    assert found.pop(DIGEST)
    assert found == {"a": ["nan", "inf", "-inf"], "b": "nan", "c": "d", "e": True}


def test_a_json_file_with_one_bit_flipped_is_refused_or_says_the_same(tmp_path: Path) -> None:
    value = {"rule": "fedasync", "alpha": 0.6, "inner": {"b": [1, 2], "a": None}}
    write_json(tmp_path / "a.json", value)
    whole, refused = (tmp_path / "a.json").read_bytes(), 0
    for place in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        (tmp_path / "a.json").write_bytes(damaged)
        try:
            assert read_json(tmp_path / "a.json") == value
        except InvalidValue:
            refused += 1
    assert refused > 6 * len(whole)


def test_a_json_file_without_a_digest_is_read_as_it_is(tmp_path: Path) -> None:
    for text in ('{"x_sha256": "' + "0" * 64 + '"}', '{"a": 1, "x_sha256": "' + "0" * 64 + '"}\n', "{}"):
        (tmp_path / "a.json").write_text(text)
        assert read_json(tmp_path / "a.json") == json.loads(text)
    write_json(tmp_path / "a.json", {})
    assert read_json(tmp_path / "a.json") == {}
