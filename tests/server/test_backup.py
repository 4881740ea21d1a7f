"""A backup is taken while the run goes on, is verified, and goes on anywhere, as a run of its own."""

import http.client
import io
import json
import shutil
import sqlite3
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offbeat.cli import main
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.loading import load
from offbeat.server import capture
from offbeat.server.backup import back_up, receive
from offbeat.server.capture import HELD, HELD_LOCK, Capture, Vanished
from offbeat.server.verify import sentence, verify
from offbeat.settings import Settings
from offbeat.storage.backup_marker import MARKER, read_marker
from offbeat.storage.disk import Disk
from offbeat.storage.json_file import read_json, sealed
from offbeat.storage.ledger import Ledger
from offbeat.storage.ledger_copy import LedgerSnapshot
from offbeat.storage.lock import Lock
from offbeat.task import Trained
from offbeat.worker.api_client import ApiClient, Hello
from offbeat.worker.http_client import HttpClient
from offbeat.worker.interrupts import Interrupts
from offbeat.worker.journal import Journal
from offbeat.worker.loop import Worker as RealWorker
from offbeat.worker.outbox import Outbox
from offbeat.worker.settings import Address, WorkerSettings
from tests.server.serving import PATIENCE_S, Running, Worker, serving

LIMITS = {"checkpoint_every": 3}
Versions = dict[int, bytes]


def taken(source: str, out: Path) -> Any:
    """What `offbeat backup --json` says."""
    result = CliRunner().invoke(main, ["backup", source, str(out), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def names_in(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def restored(backed_up: Path, folder: Path, task: Path) -> Path:
    """Somewhere else, with the task beside it: a folder for `serving`."""
    shutil.copytree(backed_up, folder / "run")
    shutil.copy(task, folder / "line.py")
    return folder


@contextmanager
def pushing(running: Running, seen: Versions, workers: int = 2) -> Iterator[None]:
    """Workers that push all the while, and note every version that they see."""
    stop, failures = threading.Event(), list[BaseException]()

    def work(number: int) -> None:
        try:
            worker = Worker(running, f"w{number}")
            while not stop.is_set():
                assert worker.work(step=0.5 + number).status == 200
                newest = running.call("GET", "/v1/models/latest")
                seen[int(newest.headers["Offbeat-Epoch"])] = newest.body
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(workers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not failures, failures


def when_applied(running: Running, count: int) -> None:
    committed = threading.Event()
    while running.status()["applied"] < count:
        committed.wait(0.005)


# --- while it runs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "keep_updates", "backups"),
    [
        ("fedasync", "needed", 3),
        pytest.param("fedasync", "needed", 20, marks=pytest.mark.slow),
        pytest.param("delta", "needed", 12, marks=pytest.mark.slow),
        pytest.param("fedbuff:3", "all", 12, marks=pytest.mark.slow),
        pytest.param("fedavg:2", "needed", 12, marks=pytest.mark.slow),
    ],
)
def test_backups_of_a_run_that_goes_on_are_whole_and_go_on(
    tmp_path: Path, rule: str, keep_updates: str, backups: int
) -> None:
    settings, limits = (
        {"rule": rule, "evaluate_every": 4, "keep_best": "size"},
        {**LIMITS, "keep_updates": keep_updates},
    )
    seen = Versions()
    with serving(tmp_path, settings, limits) as running:
        with pushing(running, seen):
            for number in range(backups):
                when_applied(running, 5 * number + 4)
                facts = taken(running.url if number % 2 else str(running.folder), tmp_path / f"b{number}")
                assert facts["agrees"]
                assert facts["backup"]["run"] == running.status()["run"]
        original, ended = running.status()["run"], running.status()["applied"]
        assert [name for name in names_in(running.folder) if name.startswith(HELD)] == []
    assert verify(tmp_path / "run")["agrees"]
    compared = 0
    for number in range(backups):
        backed_up = tmp_path / f"b{number}"
        facts = verify(backed_up)
        folder = tmp_path / f"f{number}"
        folder.mkdir()
        with serving(restored(backed_up, folder, tmp_path / "line.py"), settings, limits) as fork:
            status = fork.status()
            assert status["run"] != original
            assert status["applied"] == facts["decided"] <= ended
            assert fork.server.run.mixer.x.vector.tobytes() == model_bytes(fork)
            if status["t"] in seen and not status["queued"]:
                assert fork.call("GET", "/v1/models/latest").body == seen[status["t"]]
                compared += 1
            assert Worker(fork).work().status == 200
        again = verify(folder / "run")
        assert again["agrees"], sentence(again)
        assert again["decisions"] == facts["decisions"] + 1
    assert compared
    if keep_updates == "all":
        assert verify(tmp_path / f"b{backups - 1}")["from"] == 0


def model_bytes(running: Running) -> bytes:
    return running.call("GET", "/v1/models/latest").body[-len(running.x) :]


def test_a_backup_of_a_run_that_stands_still_is_everything(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 5}, LIMITS) as running:
        worker = Worker(running)
        for _ in range(5):
            worker.work()
        while not (running.folder / "summary.json").exists():
            threading.Event().wait(0.005)
    facts = taken(str(tmp_path / "run"), tmp_path / "out")
    assert facts["backup"]["files"] == sum(file.is_file() for file in (tmp_path / "out").rglob("*"))
    for name in ("summary.json", "x.safetensors", "settings.json", "layout.json", "x_0.safetensors"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()
    assert {"server.json", ".lock", "ledger.sqlite-wal"}.isdisjoint(names_in(tmp_path / "out"))
    other = tmp_path / "other"
    other.mkdir()
    with serving(restored(tmp_path / "out", other, tmp_path / "line.py"), {"epochs": 7}, LIMITS) as fork:
        assert fork.status()["t"] == 5
        worker = Worker(fork)
        for _ in range(2):
            assert worker.work().status == 200


# --- the fork --------------------------------------------------------------------------------------------------------


@pytest.fixture
def forked(tmp_path: Path) -> Iterator[tuple[Running, Running, Worker]]:
    """A run and its fork, both being served, and a worker of the original, which was given task 7 after the backup.

    Another one has task 6, from before.
    """
    with serving(tmp_path, limits=LIMITS) as original:
        worker = Worker(original, "ann")
        for _ in range(5):
            worker.work()
        assert Worker(original, "bob").lease()["task"] == 6
        taken(original.url, tmp_path / "out")
        assert worker.lease()["task"] == 7
        other = tmp_path / "other"
        other.mkdir()
        with serving(restored(tmp_path / "out", other, tmp_path / "line.py"), limits=LIMITS) as fork:
            yield original, fork, worker


def test_the_fork_shows(forked: tuple[Running, Running, Worker], tmp_path: Path) -> None:
    original, fork, _ = forked
    marker = read_marker(tmp_path / "out")
    assert marker is not None
    assert marker.run == original.status()["run"] != fork.status()["run"]
    with Ledger.open(fork.folder / "ledger.sqlite", read_only=True) as ledger:
        (row,) = ledger.rows("forked")
    assert json.loads(row.detail or "") == {
        "fork": fork.status()["run"],
        "run": marker.run,
        "row": marker.row,
        "head": marker.head,
    }
    assert not (fork.folder / MARKER).exists()
    assert json.loads((fork.folder / "run.json").read_text())["run"] == fork.status()["run"]
    assert fork.status()["in_flight"] == 0
    assert original.status()["in_flight"] == 2
    said = sentence(verify(fork.folder))
    assert f"This is run {fork.status()['run']}, forked from a backup of run {marker.run} at row {marker.row}." in said
    assert "in an unbroken chain" in said
    assert f"A backup of run {marker.run} up to row {marker.row}" in sentence(verify(tmp_path / "out"))


def test_a_worker_of_the_original_is_told_and_its_update_is_mixed_under_no_number_of_the_fork(
    forked: tuple[Running, Running, Worker],
) -> None:
    original, fork, worker = forked
    data = worker.train({"model": "/v1/models/latest"})
    lost = Worker(original, "nobody")  # the original goes on
    lost.running = worker.running = fork
    for stranger in (worker, lost):
        answer = stranger.push(7, data)
        assert (answer.status, answer.json["error"]) == (401, "unknown_session")
    again = Worker(fork, "ann", holding=7)
    assert again.joined["run"] == fork.status()["run"] != original.status()["run"]
    assert again.number == worker.number
    lease = again.lease()
    assert lease["task"] == 7, "the number is used again"
    answer = again.push(7, data, Offbeat_Run=original.status()["run"])
    assert (answer.status, answer.json["error"]) == (404, "unknown_task")
    assert fork.status()["applied"] == 5
    assert again.push(7, again.train(lease), Offbeat_Run=fork.status()["run"]).status == 200
    worker.running = original
    assert worker.push(7, data, Offbeat_Run=original.status()["run"]).status == 200


def test_a_real_worker_of_the_original_drops_what_it_holds_and_works_for_the_fork(
    forked: tuple[Running, Running, Worker], tmp_path: Path
) -> None:
    """Its outbox has an update of task 7, which the fork gives out, too."""
    original, fork, _ = forked
    task = load(str(tmp_path / "line.py"), Settings())
    ours, theirs = fork.status()["run"], original.status()["run"]
    with Outbox(tmp_path / "outbox", name="ann") as outbox:
        wrong = fork.server.run.mixer.x.copy()
        wrong.vector[:] = 1e9
        outbox.keep(theirs, 7, wrong, Trained(5, 2))
        journal, said, interrupts = Journal(tmp_path / "journal"), list[str](), Interrupts()

        def say(line: str) -> None:
            said.append(line)
            if line.startswith("pushed"):
                interrupts.stop()

        client = ApiClient(HttpClient(Address.of(fork.url)), Hello("ann", "line.py"))
        settings = WorkerSettings(server=fork.url)
        RealWorker(client, outbox, lambda _: task, settings, journal=journal, interrupts=interrupts, say=say).run()
        journal.close()
    assert f"dropped the update of task 7: it is of run {theirs}, the server has {ours}" in said
    lines = [json.loads(line) for line in (tmp_path / "journal").read_text().splitlines()]
    assert {(line["run"], line["task"], line["outcome"]) for line in lines} == {(ours, 7, "applied")}
    assert abs(fork.server.run.mixer.x.vector).max() < 1e6
    assert verify(fork.folder, tmp_path / "journal")["journal"] == 1


def test_a_start_without_a_marker_keeps_its_run(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        run = running.status()["run"]
        Worker(running).work()
    back_up(tmp_path / "run", tmp_path / "out")
    with serving(tmp_path) as running:
        assert running.status()["run"] == run
    other = tmp_path / "other"
    other.mkdir()
    runs = set[str]()
    for _ in range(2):
        with serving(restored(tmp_path / "out", other, tmp_path / "line.py") if not runs else other) as fork:
            runs.add(fork.status()["run"])
    assert len(runs) == 1
    assert runs != {run}
    with Ledger.open(other / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.count("forked") == 1


@pytest.mark.parametrize("step", ["write_marker", "record_forked", "write_run", "forget_marker"])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_at_the_first_start_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    with serving(tmp_path, limits=LIMITS) as running:
        worker, original = Worker(running), running.status()["run"]
        for _ in range(4):
            worker.work()
    back_up(tmp_path / "run", tmp_path / "out")
    other = restored(tmp_path / "out", tmp_path / "other", tmp_path / "line.py")
    places: dict[str, tuple[Any, str, Callable[..., bool]]] = {
        "write_marker": (Disk, "write_whole", lambda _disk, path, *_: path.name == MARKER),
        "record_forked": (Ledger, "flush", lambda ledger: any(r.kind == "forked" for r in ledger._waiting)),
        "write_run": (Disk, "write_whole", lambda _disk, path, *_: path.name == "run.json"),
        "forget_marker": (Disk, "remove", lambda _disk, path: path.name == MARKER),
    }
    owner, name, meant = places[step]
    done = getattr(owner, name)

    def crash(*arguments: Any) -> Any:
        if not meant(*arguments):
            return done(*arguments)
        if after:
            done(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, crash)
        with pytest.raises(KeyboardInterrupt), serving(other, limits=LIMITS):
            pass
    marker = read_marker(other / "run")
    with serving(other, limits=LIMITS) as fork:
        run = fork.status()["run"]
        assert run != original
        assert marker is None or marker.fork in ("", run)
        assert Worker(fork).work().status == 200
    with Ledger.open(other / "run" / "ledger.sqlite", read_only=True) as ledger:
        (row,) = ledger.rows("forked")
        assert json.loads(row.detail or "")["fork"] == run
    assert not (other / "run" / MARKER).exists()
    assert verify(other / "run")["agrees"]


def changed_marker(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        facts = read_json(folder / MARKER)
        (folder / MARKER).write_bytes(sealed(json.dumps(facts | changes)))

    return change


def edited(statement: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        with closing(sqlite3.connect(folder / "ledger.sqlite")) as connection, connection:
            assert connection.execute(statement).rowcount

    return edit


other_coefficient = edited("UPDATE events SET new = 0.9 WHERE kind = 'decided' AND decision = 3")
no_outcome = edited("UPDATE events SET outcome = 'applies' WHERE kind = 'decided'")
without_head = edited("UPDATE commits SET head = zeroblob(32)")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda folder: (folder / MARKER).write_text("{"), "restore|must be a JSON object"),
        (lambda folder: (folder / MARKER).write_text("{}"), "is damaged"),
        (changed_marker(run="other"), "and the folder of run"),
        (changed_marker(row=3), "had another head at row 3"),
        (edited("DELETE FROM events WHERE sequence = (SELECT max(sequence) FROM events)"), "are missing|at row|chain"),
        (without_head, "are not those that its checkpoint was taken of"),
    ],
)
def test_a_damaged_backup_is_not_started(tmp_path: Path, damage: Callable[[Path], None], says: str) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        for _ in range(3):
            worker.work()
    back_up(tmp_path / "run", tmp_path / "out")
    other = restored(tmp_path / "out", tmp_path / "other", tmp_path / "line.py")
    damage(other / "run")
    for _ in range(2):
        with pytest.raises(OffbeatError, match=says), serving(other):
            pass


# --- what can go wrong -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of seven updates whose server was stopped."""
    folder = tmp_path_factory.mktemp("run")
    with serving(folder, {"rule": "delta"}, LIMITS) as running:
        worker = Worker(running)
        for _ in range(7):
            worker.work()
    return folder / "run"


@pytest.mark.parametrize("writable", [True, False])
def test_what_is_removed_meanwhile_is_tried_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    monkeypatch.setattr("offbeat.server.backup.os.access", lambda *_: writable)
    tries = list[str]()

    def hold(self: Capture, name: str, *, needed: bool = False) -> None:
        if needed and name.startswith("updates/"):
            tries.append(name)
            raise Vanished(name)
        held(self, name, needed=needed)

    held = Capture._hold
    monkeypatch.setattr(Capture, "_hold", hold)
    assert back_up(finished, tmp_path / "out")["agrees"]
    assert len(tries) == capture.TRIES_FOR_TWO
    assert len(list((tmp_path / "out" / "checkpoints").glob("*.json"))) == 1, "the newest alone will do"
    monkeypatch.setattr(capture, "TRIES", 3)
    with pytest.raises(OffbeatError, match=r"updates/\d+.safetensors is missing, and was at each of 3 tries"):
        back_up(finished, tmp_path / "second")
    assert names_in(tmp_path) == ["out"]
    assert [name for name in names_in(finished) if name.startswith(HELD)] == []


def test_a_checkpoint_that_goes_while_the_ledger_is_read_is_not_used(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it go rows that its redo needs."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    marks = sorted((int(file.stem) for file in (folder / "checkpoints").glob("*.json")), reverse=True)
    assert len(marks) == 2

    class Pruning(LedgerSnapshot):
        def __init__(self, path: Path) -> None:
            (folder / "checkpoints" / f"{marks[1]}.json").unlink(missing_ok=True)
            super().__init__(path)

    monkeypatch.setattr(capture, "LedgerSnapshot", Pruning)
    assert back_up(folder, tmp_path / "out")["agrees"]
    assert [file.stem for file in (tmp_path / "out" / "checkpoints").glob("*.json")] == [str(marks[0])]


def test_a_run_that_may_only_be_read_is_copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names_in(finished)
    monkeypatch.setattr("offbeat.server.backup.os.access", lambda *_: False)
    monkeypatch.setattr(
        "offbeat.server.capture.os.link", lambda *_: pytest.fail("a link in a folder that may only be read")
    )
    assert back_up(finished, tmp_path / "out")["agrees"]
    assert names_in(finished) == before


def test_without_links_files_are_copied(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("offbeat.server.capture.os.link", refuse)
    assert back_up(finished, tmp_path / "out")["agrees"]


def test_a_backup_shares_no_file_with_its_run(finished: Path, tmp_path: Path) -> None:
    back_up(finished, tmp_path / "out")
    assert {file.stat().st_nlink for file in (tmp_path / "out").rglob("*") if file.is_file()} == {1}


def test_what_is_there_is_not_touched(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for source in (str(finished), "http://127.0.0.1:1"):
        result = CliRunner().invoke(main, ["backup", source, str(tmp_path / "out")])
        assert result.exit_code == 2
        assert "is there already" in result.output
    assert names_in(tmp_path) == ["out"]


def test_a_backup_does_not_lie_in_what_it_is_of(finished: Path) -> None:
    with pytest.raises(InvalidValue, match="lies in the run's own folder"):
        back_up(finished, finished / "out")


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="not the folder of a run"):
        back_up(tmp_path / "none", tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_disk_without_room_is_said_before_anything_is_copied(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr("offbeat.server.backup.shutil.disk_usage", lambda _: usage)
    with pytest.raises(OffbeatError, match="has 1 MB free, and the backup takes"):
        back_up(finished, tmp_path / "out")
    assert names_in(tmp_path) == []


def test_a_disk_that_fills_up_leaves_nothing(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offbeat.server.backup.os.fsync", full)
    with pytest.raises(OffbeatError, match="No space left on device"):
        back_up(finished, tmp_path / "out")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (other_coefficient, "does not verify: the chain of the ledger: rows"),
        (no_outcome, "'applies' is not a valid Outcome"),
    ],
)
def test_what_does_not_verify_is_not_kept(
    finished: Path, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    damage(folder)
    with pytest.raises(OffbeatError, match=says):
        back_up(folder, tmp_path / "out")
    assert names_in(tmp_path) == ["run"]


def test_leftovers_of_a_killed_backup_go_and_those_of_one_under_way_stay(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "settings.json").write_text("{}")
    dead, alive = finished / f"{HELD}dead", finished / f"{HELD}alive"
    for folder in (dead, alive):
        folder.mkdir()
        (folder / HELD_LOCK).touch()
    lock = Lock.take(alive / HELD_LOCK)
    try:
        assert back_up(finished, tmp_path / "out")["agrees"]
        assert names_in(tmp_path) == ["out"]
        assert not dead.exists()
        assert alive.exists()
    finally:
        lock.release()
        shutil.rmtree(alive)


def test_two_backups_to_one_place_do_not_meet(finished: Path, tmp_path: Path) -> None:
    lock = Lock.take(tmp_path / "out.partial.lock")
    try:
        with pytest.raises(InvalidValue, match="is being written by process"):
            back_up(finished, tmp_path / "out")
    finally:
        lock.release()


# --- over the network ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with serving(tmp_path_factory.mktemp("served"), limits=LIMITS) as running:
        worker = Worker(running)
        for _ in range(4):
            worker.work()
        answer = running.call("GET", "/v1/backup")
        assert answer.headers["Content-Type"] == "application/x-tar"
        assert int(answer.headers["Content-Length"]) == len(answer.body)
        head = running.call("HEAD", "/v1/backup")
        assert (head.status, head.body) == (200, b"")
        return answer.body


def as_server(data: bytes) -> Callable[[], AbstractContextManager[tuple[Any, int]]]:
    @contextmanager
    def connect() -> Iterator[tuple[Any, int]]:
        yield io.BytesIO(data), len(data)

    return connect


def test_what_is_sent_is_a_tar_file_that_ends_with_the_settings(sent: bytes, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        assert tar.getnames()[-1] == "settings.json"
    assert receive(as_server(sent), tmp_path / "out")["agrees"]


def test_a_backup_that_breaks_off_is_none(sent: bytes, tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(sent)) as tar:
        ends = [member.offset for member in tar]
    for cut in (0, 100, 512, len(sent) // 2, len(sent) // 2 + 1, *ends[1::3], ends[-1]):
        with pytest.raises(OffbeatError, match=r"no whole backup|broke off|is damaged|no settings"):
            receive(as_server(sent[:cut]), tmp_path / "out")
        assert names_in(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../escaped", "/absolute", "updates/../../escaped", "other/1.safetensors", ".lock", "a\nb", "updates"]
)
def test_only_names_of_a_backup_are_unpacked(tmp_path: Path, name: str) -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        member = tarfile.TarInfo(name)
        if name == "updates":
            member.type, member.linkname = tarfile.SYMTYPE, "/"
        tar.addfile(member)
    (tmp_path / "inner").mkdir()
    with pytest.raises(InvalidValue, match="which no backup has"):
        receive(as_server(data.getvalue()), tmp_path / "inner" / "out")
    assert names_in(tmp_path) == ["inner"]
    assert names_in(tmp_path / "inner") == []


def test_one_backup_at_a_time(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        lock = running.server.context.backing_up
        running.server.loop.call_soon_threadsafe(lambda: running.server.loop.create_task(lock.acquire()))
        while not lock.locked():
            threading.Event().wait(0.005)
        answer = running.call("GET", "/v1/backup")
        assert (answer.status, answer.json["error"]) == (503, "not_now")
        running.server.loop.call_soon_threadsafe(lock.release)
        while lock.locked():
            threading.Event().wait(0.005)
        assert running.call("GET", "/v1/backup").status == 200


def test_a_reader_that_goes_away_leaves_nothing_held(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        Worker(running).work()
        with (running.folder / "x_0.safetensors").open("ab") as file:
            file.truncate(64 << 20)  # more than a socket takes at once
        connection = http.client.HTTPConnection("127.0.0.1", int(running.url.rpartition(":")[2]))
        connection.request("GET", "/v1/backup")
        assert connection.getresponse().status == 200
        assert [name for name in names_in(running.folder) if name.startswith(HELD)]
        connection.close()
        while [name for name in names_in(running.folder) if name.startswith(HELD)]:
            threading.Event().wait(0.005)


def test_a_server_that_is_gone_is_said(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["backup", "http://127.0.0.1:1", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "does not answer" in result.output
    assert names_in(tmp_path) == []
