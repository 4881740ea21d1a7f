"""Runs of a comparison on a cluster that stands in for Ray: what comes back, what is lost, what goes on."""

import sys
from pathlib import Path
from typing import Any

import pytest

from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.hosting.loading import load
from offbeat.settings import Settings
from offbeat.sim.compare import compare
from offbeat.sim.lockstep import Failure
from offbeat.sim.on_ray import share_actor, shares
from offbeat.sim.on_ray.folders import arrived, packed_folder, unpack
from offbeat.sim.on_ray.shares import run_on_ray
from offbeat.sim.on_ray.task_files import TaskFiles, travelling
from offbeat.sim.run import StopRequested
from offbeat.sim.spec import Spec
from offbeat.storage.json_file import read_json, write_json
from offbeat.storage.lock import Lock
from tests.simulation.comparing import change, written
from tests.simulation.standing_in import StandIn


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """News at every moment, so that a loss finds some runs here and others not."""
    monkeypatch.setattr(share_actor, "NEWS_EVERY_S", 0.001)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    return written(tmp_path)


def run(spec: Path, out: Path, stand_in: StandIn, tell: Any = lambda _: None, **options: Any) -> list[Failure]:
    read = Spec.read(spec)
    return run_on_ray(read.task, read.entries(out), tell, connect=stand_in.connect, **options)


def bits(folder: Path) -> dict[str, str]:
    found = folder.glob("*/*/summary.json")
    return {str(path.relative_to(folder)): read_json(path)["x_sha256"] for path in found}


@pytest.fixture
def whole(spec: Path, tmp_path: Path) -> dict[str, str]:
    compare(spec, tmp_path / "whole", processes=1, pictures=False)
    return bits(tmp_path / "whole")


def test_runs_come_back_whole_and_the_comparison_is_the_same(
    spec: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = StandIn(4)
    monkeypatch.setattr(
        "offbeat.sim.backends.run_on_ray", lambda *given, **named: run_on_ray(*given, **named, connect=stand_in.connect)
    )
    told: list[tuple[float, int]] = []
    there = compare(spec, tmp_path / "out", on="ray", pictures=False, on_progress=lambda *far: told.append(far))
    assert there.rows() == compare(spec, tmp_path / "whole", processes=1).rows()
    assert bits(tmp_path / "out") == whole
    assert (told[0], told[-1]) == ((0, 6), (6, 6))
    for path in (tmp_path / "out").glob("*/seed-*"):
        assert read_json(path / "summary.json")["dir"] == str(path)
        assert read_json(path / "settings.json") == read_json(
            tmp_path / "whole" / path.relative_to(tmp_path / "out") / "settings.json"
        )
        assert {"ledger.sqlite", "metrics.csv", "contribution.csv", "x.safetensors"} <= {f.name for f in path.iterdir()}
    assert not list((tmp_path / "out").rglob(".*")), "neither locks nor what was written aside"
    assert len(stand_in.actors) == 4
    assert stand_in.is_closed


def test_what_a_lost_node_had_not_finished_is_done_again(spec: Path, whole: dict[str, str], tmp_path: Path) -> None:
    for seed in range(3):
        stand_in = StandIn(2, loss=0.3, lost_max=shares.LOST_MAX, seed=seed)
        assert run(spec, tmp_path / str(seed), stand_in) == []
        assert bits(tmp_path / str(seed)) == whole
        assert stand_in.lost == shares.LOST_MAX


def test_a_finished_run_is_not_run_again_when_its_node_is_lost(
    spec: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    stand_in, out = StandIn(1), tmp_path / "out"
    before: dict[str, int] = {}

    def lose_after_some(_far: float) -> None:
        found = {str(path): path.stat().st_mtime_ns for path in out.glob("*/*/summary.json")}
        if found and not before:
            before.update(found)
            stand_in.lose(stand_in.actors[0])

    assert run(spec, out, stand_in, lose_after_some) == []
    assert bits(out) == whole
    assert before
    assert all(Path(path).stat().st_mtime_ns == at for path, at in before.items())
    assert len(stand_in.actors) == 1 + 6 - len(before), "the others were done each for itself"


def test_a_run_that_takes_its_actor_with_it_takes_no_other(
    spec: Path, whole: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(spec, ('reach = "slow"', 'reach = "fast"'))
    stand_in = StandIn(2)
    news = share_actor.ShareActor.news

    def deadly(self: share_actor.ShareActor) -> Any:
        if any(entry.seed == 2 and entry.method == "slow" for entry in self._share):
            stand_in.lose(next(actor for actor in stand_in.actors if actor.made is self))
        return news(self)

    monkeypatch.setattr(share_actor.ShareActor, "news", deadly)
    monkeypatch.setattr(share_actor, "NEWS_EVERY_S", 0.05)
    failures = run(spec, tmp_path / "out", stand_in)
    assert [(failure.method, failure.seed) for failure in failures] == [("slow", 2)]
    assert f"its actor was lost {shares.LOST_MAX + 1} times" in failures[0].message
    assert bits(tmp_path / "out") == {
        name: digest for name, digest in whole.items() if name != "slow/seed-2/summary.json"
    }


def test_runs_that_fail_are_noted_with_the_place_and_the_others_come_back(
    spec: Path, whole: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "fail-2").touch()
    failures = run(spec, tmp_path / "out", StandIn(2))
    assert sorted((failure.method, failure.seed) for failure in failures) == [("fast", 2), ("slow", 2)]
    assert all(failure.message.startswith("ValueError: no luck (pull.py:") for failure in failures)
    assert bits(tmp_path / "out") == {name: digest for name, digest in whole.items() if "seed-2" not in name}


@pytest.mark.parametrize("part", ["", ":many"])
@pytest.mark.parametrize("on_ray", [True, False])
def test_a_stopped_comparison_comes_back_with_its_checkpoints_and_goes_on_anywhere(
    on_ray: bool, part: str, whole: dict[str, str], tmp_path: Path
) -> None:
    spec, out = written(tmp_path, part), tmp_path / "out"
    (tmp_path / "slow").touch()

    def stop(far: float) -> None:
        if far > 0.2:
            raise StopRequested

    stand_in = StandIn(2)
    with pytest.raises(StopRequested):
        run(spec, out, stand_in, stop)
    assert all(actor.is_lost for actor in stand_in.actors)
    begun = {path.parent for path in out.glob("*/*/settings.json")}
    unfinished = {path for path in begun if not (path / "summary.json").exists()}
    assert unfinished
    assert all((path / "checkpoint.safetensors").exists() for path in unfinished)
    (tmp_path / "slow").unlink()
    if on_ray:
        left = [entry for entry in Spec.read(spec).entries(out) if not (entry.folder / "summary.json").exists()]
        again = StandIn(1)
        assert run_on_ray(Spec.read(spec).task, left, lambda _: None, connect=again.connect) == []
        assert sum("checkpoint.safetensors" in files for files in again.hired[0][2]) == len(unfinished)
    else:
        compare(spec, out, processes=1, pictures=False)
    assert bits(out) == whole


def test_a_cluster_on_which_nothing_starts_is_an_error_in_words(spec: Path, tmp_path: Path) -> None:
    with pytest.raises(OffbeatError, match="no actor can start on this Ray cluster"):
        run(spec, tmp_path / "out", StandIn(2, loss=1.0))


def test_a_cluster_that_says_nothing_is_not_waited_for_for_ever(
    spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "SILENCE_MAX_S", 0.0)
    monkeypatch.setattr(StandIn, "ended", lambda *_: [])
    with pytest.raises(OffbeatError, match="the Ray cluster told nothing for 0 s"):
        run(spec, tmp_path / "out", StandIn(2))


def test_a_run_that_another_process_writes_is_left_to_it(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "fast" / "seed-1"
    folder.mkdir(parents=True)
    lock = Lock.take(folder / ".lock")
    failures = run(spec, tmp_path / "out", StandIn(6))
    lock.release()
    assert [(failure.method, failure.seed) for failure in failures] == [("fast", 1)], failures
    assert "is being written by another process" in failures[0].message
    assert len(bits(tmp_path / "out")) == 5


# --- what is wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"on": "slurm"}, "on is 'slurm' but must be here or ray"),
        ({"ray_address": "auto"}, "ray_address is set, but the runs stay here; say --on ray"),
    ],
)
def test_places_that_make_no_sense_are_refused(spec: Path, tmp_path: Path, options: Any, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        compare(spec, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_ray_inside_ray_is_refused(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.sim.backends.installed", lambda: None)
    change(spec, ("epochs = 4", 'executor = "ray"'))
    with pytest.raises(InvalidValue, match="method 'slow': executor is ray, and the whole run goes to Ray already"):
        compare(spec, tmp_path / "out", on="ray")


def test_without_ray_one_line_says_what_to_install(spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"^ray is not installed; run: pip install 'offbeat\[ray\]'$"):
        compare(spec, tmp_path / "out", on="ray")
    assert not (tmp_path / "out").exists()


# --- what travels ----------------------------------------------------------------------------------------------------


def test_a_tasks_file_travels_with_what_it_imports_from_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    (home / "centre_parts").mkdir(parents=True)
    (home / "centre_parts" / "__init__.py").write_text("")
    (home / "centre_parts" / "inner.py").write_text("centre = 3.0\n")
    (home / "unrelated.py").write_text("raise ValueError\n")
    (home / "mine.py").write_text(
        "from centre_parts.inner import centre\nfrom tests.simulation.test_executors import Asking\ntask = Asking()\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    spec = f"{home / 'mine.py'}:task"
    task = load(spec, Settings())
    files = TaskFiles.of(spec)
    assert files.files.keys() == {"mine.py", "centre_parts/__init__.py", "centre_parts/inner.py"}
    assert files.placed() == spec, "where the same files are there, they are used"
    (home / "centre_parts" / "inner.py").write_text("centre = 4.0\n")
    elsewhere = Path(files.placed().partition(":")[0])
    assert elsewhere.parent != home
    assert (elsewhere.parent / "centre_parts" / "inner.py").read_text() == "centre = 3.0\n"
    (home / "centre_parts" / "inner.py").write_text("centre = 3.0  # another comment is the same task\n")
    recipe = travelling(task)
    assert recipe is not None
    assert recipe[0](*recipe[1]).identity == task.identity  # type: ignore[attr-defined]


def test_a_built_in_task_travels_by_its_name() -> None:
    assert TaskFiles.of("digits").files == {}
    assert TaskFiles.of("digits").placed() == "digits"


def test_a_folder_that_comes_back_takes_the_place_of_what_was_there(tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here" / "seed-1"
    for folder, name in ((there, "new.csv"), (here, "checkpoint.safetensors")):
        folder.mkdir(parents=True)
        (folder / name).write_bytes(b"\x00\xff")
    write_json(there / "summary.json", {"t": 3, "dir": "/on/the/node"})
    (there / "summary.json.77.aside").touch()
    (there / ".lock").touch()
    arrived(packed_folder(there), here)
    assert {path.name for path in here.iterdir()} == {"new.csv", "summary.json"}
    assert read_json(here / "summary.json") == {"t": 3, "dir": str(here)}
    assert [path.name for path in here.parent.iterdir()] == ["seed-1"]
    assert packed_folder(tmp_path / "nowhere") == {}


def test_a_file_that_would_leave_its_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="is not the name of a file of a run"):
        unpack({"../x": b""}, tmp_path / "a")
