"""What a worker claims is checked against what the server knows: gradients, samples, values, its model's base."""

import json
import logging
import shutil
from collections.abc import Iterator
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offbeat.core.model_base import digest_of_base
from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.loading import load
from offbeat.hosting.task_host import TaskDescription
from offbeat.hosting.task_identity import accepted_in, identity
from offbeat.protocol.messages import TOTAL_MAX, AnswerPush, Decision, Lease, Outcome, UpdateArrived
from offbeat.server import claims
from offbeat.server.asked_work import AskedWork
from offbeat.server.settings import ServerSettings
from offbeat.settings import Settings
from offbeat.storage.fold import RunFold
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import Row
from offbeat.task import Work, solve, start
from offbeat.worker.api_client import ApiClient, Hello, common_headers
from offbeat.worker.http_client import HttpClient
from offbeat.worker.loop import Worker as RealWorker
from offbeat.worker.outbox import Outbox
from offbeat.worker.settings import WorkerSettings
from tests.server.serving import TASK, Running, Worker, serving
from tests.server.speaking import Line, file_of, ones, put, refused, settled, until, untouched

NAMES = count()
LOGISTIC = (Path(__file__).parents[2] / "examples" / "logistic.py").read_text()
ADAPTER = '''
"""A small part is learnt beside a base that is frozen."""
import numpy as np
from offbeat import Trained
from offbeat.core.layout import Model

BASE = {base}


class Adapter:
    devices = 4

    def initial(self, seed):
        arrays = {{"x": np.zeros(6, np.float32), "y": np.zeros((2, 2), np.float32)}}
        return Model.of(arrays | {{"base.weight": np.full(9, BASE, np.float32)}}, frozen=["base.weight"])

    def train(self, model, work):
        model["x"][:] += BASE
        return Trained(samples={samples}, gradients=3)

    def evaluate(self, model):
        return {{}}


task = Adapter()
'''


def adapter(base: float = 1.0, samples: str = "7") -> str:
    return ADAPTER.format(base=base, samples=samples)


def rows(running: Running, kind: str) -> list[Row]:
    with Ledger.open(running.folder / "ledger.sqlite", read_only=True) as ledger:
        return list(ledger.rows(kind))


def whys(running: Running) -> list[str]:
    return [json.loads(row.detail or "{}")["why"] for row in rows(running, "bad_update")]


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "task", "asked"),
    [
        ({"local_iterations": 8}, LOGISTIC, 8),
        ({"local_passes": 3}, LOGISTIC, 3 * ceil(5 / 20)),
        ({"local_passes": 3, "batch_size": 2}, LOGISTIC, 3 * ceil(5 / 2)),
        ({}, LOGISTIC, 1),
        ({"local_iterations_min": 2, "local_iterations_max": 2}, TASK, 2),
    ],
    ids=["iterations", "passes", "passes of short batches", "the task's own", "the lease's"],
)
def test_no_more_gradients_than_were_asked_for_are_believed(
    tmp_path: Path, settings: dict[str, Any], task: str, asked: int
) -> None:
    with serving(tmp_path, settings, task=task) as running:
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease, 0.1)
        with untouched(running):
            found = refused(worker.push(lease["task"], data, Offbeat_Gradients=asked + 1), 422, "false_claim")
        assert f"Offbeat-Gradients is {asked + 1}, but task {lease['task']} asked for {asked}" in found["message"]
        assert worker.push(lease["task"], data, Offbeat_Gradients=asked).status == 200, "the lease is still open"
        assert whys(running) == [found["message"]]


def test_a_false_claim_is_refused_before_the_body(tmp_path: Path) -> None:
    with serving(tmp_path, {"local_iterations": 8}, task=LOGISTIC) as running:
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease)
        with Line(running, put(worker, lease["task"], data, Offbeat_Gradients=10**14, Expect="100-continue")) as line:
            refused(line.answer(), 422, "false_claim")
        assert running.call("GET", f"/v1/tasks/{lease['task']}/update", headers=worker.session).json == {"offset": 0}


def test_one_push_does_not_end_a_run_that_counts_gradients(tmp_path: Path) -> None:
    """F7 of the review: it claimed a million at once."""
    with serving(tmp_path, {"gradients": 1_000_000, "local_iterations": 10}, task=LOGISTIC) as running:
        worker = Worker(running)
        lease = worker.lease()
        refused(worker.push(lease["task"], worker.train(lease), Offbeat_Gradients=1_000_000), 422, "false_claim")
        assert not running.status()["finished"]


def test_a_liar_is_quarantined(tmp_path: Path) -> None:
    with serving(tmp_path, {"local_iterations": 8}, task=LOGISTIC) as running:
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease)
        for _ in range(5):
            refused(worker.push(lease["task"], data, Offbeat_Gradients=9), 422, "false_claim")
        answer = running.call("POST", f"/v1/workers/{worker.number}/ask?wait_s=1", headers=worker.session)
        assert "Offbeat-Gradients is 9" in refused(answer, 403, "quarantined")["message"]


def test_a_task_that_does_not_say_how_much_it_trains_is_bounded_by_a_setting(tmp_path: Path) -> None:
    with serving(tmp_path, {}, {"gradients_max": 50}) as running:
        worker = Worker(running)
        lease = worker.lease()
        data = worker.train(lease)
        found = refused(worker.push(lease["task"], data, Offbeat_Gradients=51), 422, "false_claim")
        assert found["message"] == "Offbeat-Gradients is 51; gradients_max is 50"
        assert worker.push(lease["task"], data, Offbeat_Gradients=50).status == 200


def test_the_setting_takes_the_place_of_what_the_task_says() -> None:
    about = TaskDescription("t", 1, None, None, None, False, (), batch_size=20, local_passes=2)
    assert AskedWork.of(about, Settings(), None).gradients(41) == 6
    assert AskedWork.of(about, Settings(), 1000).gradients(41) is None
    assert AskedWork.of(about, Settings(local_passes=1), 1000).gradients(41) == 3
    assert AskedWork.of(about, Settings(local_iterations=4), 1000).gradients(41) == 4
    assert AskedWork.of(about, Settings(local_passes=1, batch_size=50), None).gradients(41) == 1
    old = TaskDescription("t", 1, None, None, None, False, ())
    assert AskedWork.of(old, Settings(), None).gradients(41) is None
    assert AskedWork.of(old, Settings(local_passes=1), None).gradients(41) is None, "nobody knows its batch size"


def test_the_sum_of_all_gradients_fits_63_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F4 of the review: beyond that, every page answered 500 for ever."""
    monkeypatch.setattr(claims, "GRADIENTS_SUM_MAX", 10**15)
    with serving(tmp_path) as running:
        worker = Worker(running)
        lease = worker.lease()
        assert worker.push(lease["task"], worker.train(lease), Offbeat_Gradients=10**15 - 1).status == 200
        lease = worker.lease()
        found = refused(worker.push(lease["task"], worker.train(lease), Offbeat_Gradients=2), 422, "false_claim")
        assert "more than can be counted" in found["message"]
        assert running.status()["gradients"] == 10**15 - 1


def test_a_folder_in_which_it_does_not_fit_is_still_shown(tmp_path: Path) -> None:
    """One that an earlier version left."""
    lease = Lease(1, 1, 1, 0, 0, 0.0, 1.0)
    with Ledger.create(tmp_path / "ledger.sqlite") as ledger:
        for number in (1, 2):
            decision = Decision(number, 1.0, lease, Outcome.APPLIED, number, 0, Mix(0.5, 0.5, 0.0, True), 1, 2**63 - 1)
            ledger.record(UpdateArrived(1.0, 1, 1, 1, 2**63 - 1), [AnswerPush(1, 1, Outcome.APPLIED, decision)])
        ledger.flush()
        fold = RunFold()
        fold.read(ledger.select, 0, ledger.newest())
    assert fold.gradients == TOTAL_MAX


SIZES = [(1, 50), (49, 50), (50, 50), (51, 50), (101, 7)]


@pytest.mark.parametrize(("samples", "batch_size"), SIZES)
@pytest.mark.parametrize("local", [{}, {"local_passes": 3}, {"local_iterations": 5}])
@pytest.mark.parametrize("leased", [None, 4])
def test_no_honest_training_of_torch_counts_more(
    samples: int, batch_size: int, local: dict[str, Any], leased: int | None
) -> None:
    """However it runs: one by one, batched, compiled."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from offbeat.torch import Task

    data = [(torch.zeros(samples, 3), torch.zeros(samples, 2))]
    task = Task(lambda: torch.nn.Linear(3, 2), torch.nn.functional.mse_loss, data, batch_size=batch_size, **local)
    asked = leased or AskedWork.of(TaskDescription.of(task, ()), Settings(), None).gradients(samples)
    work, x_0 = Work(0, local_iterations=leased), start(task, 0)
    counted = {solve(task, x_0, work).trained.gradients}
    counted |= (
        {trained.gradients for _, trained in task.train_many([(x_0, work)])[0]} if not task.batchable() else set()
    )
    if not task.compilable():
        counted |= {trained.gradients for _, trained in task.train_compiled([(x_0, work)], 1)}
    assert counted == {asked}


@pytest.mark.parametrize("chosen", [{}, {"local_passes": 2}, {"local_iterations": 7}, {"batch_size": 33}])
def test_no_honest_training_of_the_example_counts_more(tmp_path: Path, chosen: dict[str, int]) -> None:
    (tmp_path / "logistic.py").write_text(LOGISTIC)
    settings = Settings.of(chosen)
    task = load(str(tmp_path / "logistic.py"), settings)
    trained = solve(task, start(task, 0), Work(1)).trained
    asked = AskedWork.of(TaskDescription.of(task, ()), settings, None)
    assert asked.gradients(trained.samples) == trained.gradients


# --- samples ---------------------------------------------------------------------------------------------------------


def declared(running: Running) -> list[tuple[int | None, int | None]]:
    return [(row.worker, row.samples) for row in rows(running, "declared")]


def test_declared_samples_are_held_to_in_every_push(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running, samples=100)
        assert worker.joined["samples"] == 100
        lease = worker.lease()
        data = worker.train(lease)
        with untouched(running):
            found = refused(worker.push(lease["task"], data, Offbeat_Samples=10**14), 422, "false_claim")
        assert "the samples of this worker are 100" in found["message"]
        assert worker.push(lease["task"], data, Offbeat_Samples=100).status == 200
        assert declared(running) == [(0, 100)]


def test_a_claim_of_samples_does_not_take_all_the_weight(tmp_path: Path) -> None:
    """F7 of the review: under fedavg:2, 1e15 samples did."""
    with serving(tmp_path, {"rule": "fedavg:2"}, {"samples_max": 1000}) as running:
        liar, honest = Worker(running, "liar"), Worker(running, "honest", samples=5)
        leases = liar.lease(), honest.lease()
        first = refused(liar.push(leases[0]["task"], liar.train(leases[0]), Offbeat_Samples=10**14), 422, "false_claim")
        assert first["message"] == f"Offbeat-Samples is {10**14}; samples_max is 1000"
        answer = running.call("POST", "/v1/workers", {"name": "liar", "protocol": 1, "samples": 1001})
        assert refused(answer, 422, "false_claim")["message"] == "samples is 1001; samples_max is 1000"
        assert honest.push(leases[1]["task"], honest.train(leases[1])).status == 200


def test_a_worker_that_declares_nothing_is_held_to_its_first_applied_push(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        assert worker.joined["samples"] is None
        nan = worker.lease()
        refused(
            worker.push(nan["task"], file_of(ones(x=np.full(6, np.nan, np.float32))), Offbeat_Samples=9),
            422,
            "not_finite",
        )
        lease = worker.lease()
        assert worker.push(lease["task"], worker.train(lease), Offbeat_Samples=8).status == 200
        assert worker.push(lease["task"], worker.train(lease), Offbeat_Samples=99).json["repeated"]
        lease = worker.lease()
        refused(worker.push(lease["task"], worker.train(lease), Offbeat_Samples=99), 422, "false_claim")
        assert worker.push(lease["task"], worker.train(lease), Offbeat_Samples=8).status == 200
        assert declared(running) == [(0, 8)]


def test_they_hold_after_a_restart_and_after_joining_again(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker, other = Worker(running, samples=100), Worker(running, "other")
        lease = other.lease()
        assert other.push(lease["task"], other.train(lease), Offbeat_Samples=8).status == 200
    with serving(tmp_path) as running:
        worker.running = other.running = running
        for one, samples in ((worker, 100), (other, 8)):
            lease = one.lease()
            refused(one.push(lease["task"], one.train(lease), Offbeat_Samples=samples + 1), 422, "false_claim")
            assert one.push(lease["task"], one.train(lease), Offbeat_Samples=samples).status == 200
        again = Worker(running)
        assert again.joined["samples"] == 100
        assert declared(running) == [(0, 100), (1, 8)]
        assert Worker(running, samples=120).joined["samples"] == 120, "its device has more data now"
        assert Worker(running, device=5).joined["samples"] is None, "another device has other data"


@pytest.mark.parametrize("wrong", [0, -1, 10**15, 1.5, True, "5"])
def test_samples_are_a_whole_number(tmp_path: Path, wrong: Any) -> None:
    with serving(tmp_path) as running:
        refused(running.call("POST", "/v1/workers", {"name": "w", "protocol": 1, "samples": wrong}), 400, "bad_request")
        worker = Worker(running)
        path = f"/v1/workers/{worker.number}/declare"
        refused(running.call("POST", path, {"samples": wrong}, worker.session), 400, "bad_request")


def test_only_the_worker_itself_declares(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker, other = Worker(running), Worker(running, "other")
        path = f"/v1/workers/{worker.number}/declare"
        refused(running.call("POST", path, {"samples": 5}, other.session), 403, "not_yours")
        refused(running.call("POST", path, {"samples": 5}), 401, "unknown_session")
        for _ in range(2):
            assert running.call("POST", path, {"samples": 5}, worker.session).status == 204
        assert declared(running) == [(0, 5)], "what is known already is not recorded again"


@pytest.mark.parametrize("name", ["samples_max", "gradients_max"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is 0 but must be a whole number >= 1"):
        ServerSettings(**{name: 0})  # type: ignore[arg-type]


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [{}, {"norm_max": 1e39}], ids=["plain", "measured"])
def test_a_value_above_value_max_is_refused_in_words(tmp_path: Path, gate: dict[str, float]) -> None:
    """F7 of the review: without a gate, 1e38 was mixed in."""
    with serving(tmp_path, gate) as running:
        worker = Worker(running)
        task = worker.lease()["task"]
        with untouched(running):
            for _ in range(2):
                answer = worker.push(task, file_of(ones(x=np.full(6, 1e38, np.float32))))
                found = refused(answer, 422, "too_large")
                assert found["message"] == f"task {task}: its update holds a value of 1e+38; value_max is 1e+08"
        assert worker.work().status == 200
        ordinary = json.loads(rows(running, "arrived")[-1].detail or "{}")
        assert "largest" not in ordinary


def test_without_a_limit_every_finite_value_is_mixed(tmp_path: Path) -> None:
    with serving(tmp_path, {"value_max": float("inf")}) as running:
        worker = Worker(running)
        assert worker.push(worker.lease()["task"], file_of(ones(x=np.full(6, 1e38, np.float32)))).status == 200
        settled(running)


def test_the_refusal_is_redone_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, {"bad_updates_max": 2}) as running:
        worker = Worker(running)
        for _ in range(2):
            refused(worker.push(worker.lease()["task"], file_of(ones(x=np.full(6, 1e9, np.float32)))), 422, "too_large")
        shutil.copytree(tmp_path, tmp_path / "killed", ignore=lambda *_: ["killed"])  # as a kill would leave it
    with serving(tmp_path / "killed", {"bad_updates_max": 2}) as running:
        assert running.status()["rejected"] == 2
        assert "value_max is 1e+08" in running.server.run.coordinator.quarantined[worker.number]


# --- the base --------------------------------------------------------------------------------------------------------

ARRAY = "0123456789abcdef"


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    room = {"in_flight_max": 4000, "tasks_per_device": 1000}
    with serving(tmp_path_factory.mktemp("adapter"), room, task=adapter()) as running:
        yield running


def described(running: Running, **changes: str | None) -> dict[str, Any]:
    """What a worker of this run would declare, and what is changed about its frozen arrays."""
    frozen = {**running.server.context.about.frozen, **changes}
    kept = {name: digest for name, digest in frozen.items() if digest is not None}
    return {"base": digest_of_base(running.server.run.layout.fingerprint, kept), "frozen": kept}


def test_the_same_base_is_admitted(adapting: Running) -> None:
    worker = Worker(adapting, f"w{next(NAMES)}", **described(adapting))
    assert worker.work().status == 200
    assert adapting.server.context.about.frozen.keys() == {"base.weight"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base.weight": ARRAY}, "the frozen array 'base.weight' holds other values than the server's"),
        ({"base.weight": None}, "the frozen array 'base.weight' is missing from the worker's model"),
        ({"more": ARRAY}, "the frozen array 'more' is not part of the server's model"),
    ],
)
@pytest.mark.parametrize("late", [False, True], ids=["joining", "declaring"])
def test_another_base_is_refused_by_name(
    adapting: Running, changes: dict[str, str | None], said: str, late: bool
) -> None:
    name, body = f"w{next(NAMES)}", described(adapting, **changes)
    if late:
        worker = Worker(adapting, name)
        answer = adapting.call("POST", f"/v1/workers/{worker.number}/declare", body, worker.session)
    else:
        answer = adapting.call("POST", "/v1/workers", {"name": name, "protocol": 1, **body})
        assert adapting.server.context.sessions.known(name) is None, "it has not joined"
    assert refused(answer, 409, "wrong_base")["message"] == said


def test_without_the_names_only_the_difference_is_told(adapting: Running) -> None:
    body = {"name": f"w{next(NAMES)}", "protocol": 1, "base": "0" * 64}
    found = refused(adapting.call("POST", "/v1/workers", body), 409, "wrong_base")
    assert found["message"] == "the worker's model has another layout or other frozen arrays"


@pytest.mark.parametrize(
    "wrong",
    [
        {"base": "x"},
        {"base": 5},
        {"frozen": []},
        {"frozen": {"a": "short"}},
        {"frozen": {"a": 5}},
        {"frozen": {"a" * 1001: ARRAY}},
        {"frozen": {str(number): ARRAY for number in range(501)}},
        {"model": "a"},
    ],
)
def test_a_declaration_that_is_none_is_refused(adapting: Running, wrong: dict[str, Any]) -> None:
    worker = Worker(adapting, f"w{next(NAMES)}")
    refused(adapting.call("POST", f"/v1/workers/{worker.number}/declare", wrong, worker.session), 400, "bad_request")


def test_a_worker_of_the_version_before_is_admitted_with_a_warning(
    adapting: Running, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "offbeat.server"):
        old, new = Worker(adapting, "old"), Worker(adapting, "new", **described(adapting))
        assert [worker.work().status for worker in (old, new, old)] == [200] * 3
    said = [record.getMessage() for record in caplog.records if "frozen arrays" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith(f"worker {old.number} (old) does not say which frozen arrays its model has")


def test_where_nothing_is_frozen_nobody_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "offbeat.server"), serving(tmp_path) as running:
        assert Worker(running).work().status == 200
    assert caplog.records == []


def test_a_run_of_the_version_before_compares_nothing(tmp_path: Path) -> None:
    with serving(tmp_path, task=adapter()):
        pass
    file = tmp_path / "run" / "run.json"
    facts = read_json(file)
    for name in ("base", "frozen", "batch_size", "local_passes", "local_iterations"):
        del facts["about"][name]
    file.write_text(json.dumps(facts))
    with serving(tmp_path) as running:
        assert Worker(running, base="0" * 64).work().status == 200


# --- Offbeat's own worker --------------------------------------------------------------------------------------------


def worked(running: Running, folder: Path, task: str, name: str = "real") -> list[str]:
    """What a real worker says, until the run is finished."""
    (folder / "own").mkdir(exist_ok=True)
    (folder / "own" / "line.py").write_text(task)
    # Python takes bytecode for current where a file has the same size and was written in the same second.
    shutil.rmtree(folder / "own" / "__pycache__", ignore_errors=True)
    said: list[str] = []
    settings = WorkerSettings(server=running.url)
    http = HttpClient(settings.address, common_headers(None), settings.context(), settings.timeouts)
    with Outbox(folder / f"outbox-{name}", name=name) as outbox:
        RealWorker(
            ApiClient(http, Hello(name, "line.py")),
            outbox,
            lambda _joined: load(str(folder / "own" / "line.py"), Settings()),
            settings,
            say=said.append,
        ).run()
    return said


def test_a_worker_with_another_base_is_told_which_array_and_ends(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 3}, task=adapter()) as running:
        with pytest.raises(OffbeatError, match=r"'base\.weight' holds other values than the server's"):
            worked(running, tmp_path, adapter(base=2.0))
        assert running.status()["applied"] == 0
        assert "the run is finished: 3 epochs" in worked(running, tmp_path, adapter())


def test_its_base_is_in_the_ledger(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 3}, task=adapter()) as running:
        worked(running, tmp_path, adapter())
        base = running.server.context.about.base
    told = [json.loads(row.detail or "{}")["base"] for row in rows(running, "declared")]
    assert told[0] == base
    assert declared(running)[-1] == (0, 7), "and its samples, once its task has told them"


def test_a_task_that_reports_other_samples_each_time_is_pushed_with_those_that_are_known(tmp_path: Path) -> None:
    with serving(tmp_path, {"epochs": 4}, task=adapter()) as running:
        said = worked(running, tmp_path, adapter(samples="7 + work.number"))
        claimed = {row.samples for row in rows(running, "decided")}
    assert len(claimed) == 1
    assert sum("but this worker holds" in line for line in said) == 1
    assert whys(running) == []


def test_a_task_with_a_method_samples_declares_before_its_first_task(tmp_path: Path) -> None:
    (tmp_path / "logistic.py").write_text(LOGISTIC)
    with serving(tmp_path, {"epochs": 2}, task=LOGISTIC) as running:
        worked(running, tmp_path, LOGISTIC)
        first = min(rows(running, "leased"), key=lambda row: row.sequence)
        (told,) = rows(running, "declared")
    assert told.samples == 200
    assert told.sequence < first.sequence


# --- the task itself -------------------------------------------------------------------------------------------------


def test_a_server_goes_on_with_a_changed_task_where_that_is_accepted(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        assert Worker(running).work().status == 200
        before = Worker(running).joined["task"]
    file = tmp_path / "line.py"
    file.write_text(f"{TASK}\n# a comment\n")
    with serving(tmp_path) as running:
        assert Worker(running).joined["task"] == before
    file.write_text(TASK.replace("gradients=3", "gradients=4"))
    with pytest.raises(InvalidValue, match="--accept-changed-task goes on with it"), serving(tmp_path):
        pass
    with serving(tmp_path, accept_changed_task=True) as running:
        assert Worker(running).joined["task"] == identity(str(file)) != before
        assert Worker(running).work().status == 200
        until(lambda: rows(running, "evaluated"))
    assert accepted_in(tmp_path / "run") == [identity(str(file))]
    with serving(tmp_path) as running:  # accepted once is enough
        assert running.status()["t"] == 2
    assert accepted_in(tmp_path / "run") == [identity(str(file))]
