"""Every number of every twin against a plain count of all rows."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.staleness import polynomial
from offbeat.errors import InvalidValue
from offbeat.sim.curve import read_curve
from offbeat.sim.run import Run, Simulation
from offbeat.storage.json_file import read_json
from offbeat.web import asynchrony, overview, runs, update_list, workers
from offbeat.web.json_twins import NUMBER_MAX
from offbeat.web.run_reader import RunReader
from tests.web.looking import DEVICES, SOME, Told, rows_of, simulated


class Looked:
    """A run, what is shown of it, and what its rows say."""

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run = folder, run
        self.reading = RunReader(folder)
        self.reading.refresh()
        self.told = Told(rows_of(folder))


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("some") / "run"
    return Looked(folder, simulated(folder, **SOME))


@pytest.fixture(scope="module", params=["fedasync", "delta", "fedbuff:3", "fedavg:4", "deadline", "slow"])
def any_rule(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Looked:
    folder = tmp_path_factory.mktemp("rule") / "run"
    settings: dict[str, Any] = {"rule": request.param}
    if request.param == "deadline":
        settings = {"rule": "fedavg:5", "group_deadline_s": 1.2, "over_selection": 1.3}  # some groups are complete
    if request.param == "slow":
        settings = {"mix_s": 0.2, "queue_max": 3}
    return Looked(folder, simulated(folder, **settings))


# --- overview --------------------------------------------------------------------------------------------------------


def test_the_overview_says_what_the_rows_say(some: Looked) -> None:
    found, told = overview.overview(some.reading), some.told
    assert found["run"] == {
        "name": "run",
        "dir": str(some.folder),
        "task": read_json(some.folder / "settings.json")["task"],
        "rule": "fedasync, alpha 0.6, polynomial:0.5",
        "state": "finished",
        "served": False,
    }
    assert (found["t"], found["epochs"], found["applied"]) == (told.t, 60, len(told.applied))
    assert found["gradients"] == sum(row.gradients or 0 for row in told.applied)
    assert told.open_at(told.rows[-1].at)
    assert found["in_flight"] == 0, "nobody waits for what is still out when a run is finished"
    assert found["queued"] == 0
    assert found["workers"] == DEVICES
    assert found["rejected"] == told.rejected()
    assert found["rejected"]["too_stale"] > 0
    assert found["duplicates"] == len(told.kind("repeated"))
    assert found["at_s"] == told.rows[-1].at
    assert found["sequence"] == told.rows[-1].sequence
    assert found["staleness_mean"] == pytest.approx(sum(row.staleness or 0 for row in told.applied) / len(told.applied))
    assert found["staleness_largest"] == max(row.staleness or 0 for row in told.applied)
    assert found["eta_s"] is None
    assert found["health"] == {"level": "good", "sentence": "finished: 60 epochs"}


def test_the_overview_agrees_with_the_summary(any_rule: Looked) -> None:
    found, summary = overview.overview(any_rule.reading), read_json(any_rule.folder / "summary.json")
    for name in ("t", "epochs", "applied", "gradients", "staleness_mean", "staleness_largest"):
        assert found[name] == pytest.approx(summary[name]), name
    assert found["metrics"] == {"x": summary["x"]}
    assert found["metrics_t"] == summary["t"]
    assert found["at_s"] == summary["virtual_s"]


def test_the_curve_is_that_of_the_run(any_rule: Looked) -> None:
    curve = overview.overview(any_rule.reading)["curve"]
    points = read_curve(any_rule.folder / "metrics.csv")
    assert [(p["t"], p["gradients"], p["metrics"]) for p in curve] == [(p.t, p.gradients, p.metrics) for p in points]
    assert [p["at_s"] for p in curve] == pytest.approx([any_rule.told.published_at(p.t) for p in points])


def test_a_long_curve_is_thinned(tmp_path: Path) -> None:
    looked = Looked(tmp_path / "run", simulated(tmp_path / "run", epochs=700, evaluate_every=1))
    curve = overview.overview(looked.reading)["curve"]
    points = {p.t: p for p in read_curve(tmp_path / "run" / "metrics.csv")}
    assert len(curve) == 500
    assert (curve[0]["t"], curve[-1]["t"]) == (0, 700)
    assert all(p["metrics"] == points[p["t"]].metrics and p["gradients"] == points[p["t"]].gradients for p in curve)


def test_the_rate_is_that_of_the_newest_updates(some: Looked) -> None:
    times = [row.at for row in some.told.applied]
    found = overview.overview(some.reading)
    assert found["updates_per_minute"] == pytest.approx(60 * len(times) / some.told.rows[-1].at)


def test_the_rate_of_a_long_run_forgets_its_beginning(tmp_path: Path) -> None:
    looked = Looked(tmp_path / "run", simulated(tmp_path / "run", epochs=300))
    times, end = [row.at for row in looked.told.applied], looked.told.rows[-1].at
    expected = 60 * 100 / (end - times[-101])
    assert overview.overview(looked.reading)["updates_per_minute"] == pytest.approx(expected)


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    looked = Looked(tmp_path / "run", simulated(tmp_path / "run", epochs=3, lease_s=float("inf")))
    story = update_list.story(looked.reading, 1)
    assert story["story"][0]["facts"]["deadline"] is None
    json.dumps([overview.overview(looked.reading), asynchrony.asynchrony(looked.reading), story], allow_nan=False)


# --- health and the time to the end: a run that is under way ---------------------------------------------------------


class Pretended(RunReader):
    """A served run whose facts the test sets."""

    state = "running"
    clock = 0.0

    def now(self) -> float:
        return self.clock


@pytest.fixture
def pretended(tmp_path: Path) -> Pretended:
    simulated(tmp_path / "run", epochs=30)
    reading = Pretended(tmp_path / "run")
    reading.refresh()
    reading.fold.ended = None
    reading.settings.update(served=True, epochs=90, queue_max=4)
    reading.clock = reading.at
    return reading


def sentence(reading: RunReader) -> tuple[str, str]:
    found = overview.health(reading)
    return found["level"], found["sentence"]


def test_the_health_of_a_run_in_one_sentence(pretended: Pretended) -> None:
    fleet = pretended.fleet.workers
    assert sentence(pretended) == ("good", "healthy")
    pretended.clock += 299.0
    assert sentence(pretended)[0] == "good"
    pretended.clock += 20.0
    assert sentence(pretended) == ("warning", "no update for 5 minutes")
    pretended.fleet._pending = dict.fromkeys(range(4), (99, True))
    assert sentence(pretended) == ("warning", "queue full: workers are told to wait")
    fleet[0].why = "NaN"
    assert sentence(pretended) == ("warning", "1 worker quarantined")
    fleet[1].why = "NaN"
    assert sentence(pretended) == ("warning", "2 workers quarantined")
    for worker in fleet.values():
        worker.why = "NaN"
    assert sentence(pretended) == ("bad", f"all {DEVICES} workers are quarantined")
    for worker in fleet.values():
        worker.here = False
    assert sentence(pretended) == ("warning", "no workers: start some with offbeat work")
    pretended.trouble = lambda: "the disk is full"
    assert sentence(pretended) == ("bad", "trouble: the disk is full")


def test_the_time_to_the_end(pretended: Pretended) -> None:
    assert overview.eta_s(pretended) == pytest.approx(60 * pretended.at / 30)
    pretended.settings["until_s"] = pretended.at + 1.5
    assert overview.eta_s(pretended) == pytest.approx(1.5)
    pretended.settings.update(until_s=None, epochs=None, gradients=45)
    assert overview.eta_s(pretended) == pytest.approx(15 * pretended.at / 30)
    pretended.settings.update(gradients=None, target="x>=1")
    assert overview.eta_s(pretended) is None


def test_the_time_to_the_end_forgets_the_beginning(tmp_path: Path) -> None:
    simulated(tmp_path / "run", epochs=150)
    reading = Pretended(tmp_path / "run")
    reading.refresh()
    reading.fold.ended = None
    reading.settings["epochs"], reading.clock = 250, reading.at
    since = Told(rows_of(tmp_path / "run")).published_at(50) or 0.0
    assert overview.eta_s(reading) == pytest.approx(reading.at - since)


# --- asynchrony ------------------------------------------------------------------------------------------------------


def test_the_histogram_and_the_weights_hold_every_update(any_rule: Looked) -> None:
    found, told = asynchrony.asynchrony(any_rule.reading), any_rule.told
    for entry in found["staleness"]:
        expected = sum(n for u, n in told.staleness.items() if entry["from"] <= u < entry["to"])
        assert entry["count"] == expected
    assert sum(entry["count"] for entry in found["staleness"]) == len(told.applied)
    pairs = Counter((row.staleness, row.new) for row in told.applied)
    assert {(w["staleness"], w["alpha_t"]): w["count"] for w in found["weights"]} == pairs


def test_the_function_is_that_of_the_settings(some: Looked) -> None:
    found = asynchrony.asynchrony(some.reading)["function"]
    assert [point["staleness"] for point in found] == list(range(17))
    s = polynomial(0.5)
    assert [point["alpha_t"] for point in found] == pytest.approx([0.6 * s(u) for u in range(17)])


def test_the_function_follows_the_rule(any_rule: Looked) -> None:
    found = {point["staleness"]: point["alpha_t"] for point in asynchrony.asynchrony(any_rule.reading)["function"]}
    rule = any_rule.reading.settings["rule"]
    if rule.startswith("fedavg"):
        assert found == {}
    else:
        assert all(found[row.staleness or 0] == pytest.approx(row.new) for row in any_rule.told.applied)


def test_too_many_weights_are_gathered() -> None:
    counts = Counter({(u, 0.6 / (1 + u) + 0.001 * j): 1 + j for u in range(2000) for j in range(3)})
    found = asynchrony.weights(counts)
    assert len(found) <= 1000
    assert sum(weight["count"] for weight in found) == counts.total()
    assert all((weight["staleness"], weight["alpha_t"]) in counts for weight in found)
    bins = asynchrony.histogram(Counter(dict.fromkeys(range(1234), 2)), 100)
    assert len(bins) <= 100
    assert sum(entry["count"] for entry in bins) == 2468
    assert asynchrony.histogram(Counter(), 100) == []


def test_the_timeline_tells_of_every_task(some: Looked) -> None:
    found, told = asynchrony.asynchrony(some.reading)["timeline"], some.told
    decided = {row.task: row for row in told.kind("decided")}
    leased = {row.task: row for row in told.kind("leased")}
    released = {row.task: row for row in told.kind("released")}
    assert {task["task"] for task in found["tasks"]} == set(leased)
    assert {worker["worker"] for worker in found["workers"]} == {row.worker for row in leased.values()}
    for task in found["tasks"]:
        row = decided.get(task["task"])
        assert task["leased_s"] == leased[task["task"]].granted_at
        assert task["worker"] == leased[task["task"]].worker
        assert task["arrived_s"] == (row.at if row else None)
        assert task["staleness"] == (row.staleness if row else None)
        ended = "released" if task["task"] in released else None
        assert task["outcome"] == (row.outcome if row else ended)
        assert task["released_s"] == (released[task["task"]].at if ended and not row else None)
        mixed = row is not None and row.keep is not None
        assert task["mixed_s"] == (told.published_at(row.t or 0) if row and mixed else None)
    assert any(task["outcome"] == "released" for task in found["tasks"])
    assert any(task["outcome"] is None for task in found["tasks"])
    assert found["from_s"] == 0.0
    assert found["to_s"] == told.rows[-1].at


def test_the_time_of_a_task_is_told_by_what_it_was_spent_on(tmp_path: Path) -> None:
    run = simulated(tmp_path, down_mbps=0.001, up_mbps="uniform:0.0005,0.001", queue_max=1, mix_s=0.5)
    found = asynchrony.asynchrony(Looked(tmp_path, run).reading)["timeline"]
    arrived = [task for task in found["tasks"] if task["arrived_s"] is not None]
    assert len({task["spent"]["upload_s"] for task in arrived}) > 3
    assert {round(task["spent"]["download_s"], 9) for task in arrived} == {4 / 125}, (
        "one number of 4 bytes at 125 bytes/s"
    )
    waited = {}
    for task in arrived:
        waited[task["task"]] = task["arrived_s"] - task["leased_s"] - sum(task["spent"].values())
        assert waited[task["task"]] >= -1e-9
    assert max(waited.values()) > 0.1, "some were told to come back, and waited"
    assert found["spent"]["waiting_s"] == pytest.approx(sum(waited.values()))
    assert found["spent"]["train_s"] == pytest.approx(sum(task["spent"]["train_s"] for task in arrived))
    queued = sum(task["mixed_s"] - task["arrived_s"] for task in arrived if task["mixed_s"] is not None)
    assert queued > 0
    assert found["spent"]["queued_s"] == pytest.approx(queued)
    assert all(task["spent"] is None for task in found["tasks"] if task["arrived_s"] is None)
    told = update_list.story(Looked(tmp_path, run).reading, arrived[0]["task"])["story"]
    assert arrived[0]["spent"].items() <= next(part["facts"] for part in told if part["kind"] == "arrived").items()


def test_without_links_all_of_it_is_training(some: Looked) -> None:
    found = asynchrony.asynchrony(some.reading)["timeline"]
    took = sum(task["arrived_s"] - task["leased_s"] for task in found["tasks"] if task["arrived_s"] is not None)
    assert found["spent"]["train_s"] == pytest.approx(took)
    assert (found["spent"]["download_s"], found["spent"]["upload_s"]) == (0, 0)


def test_the_number_in_flight_is_that_of_the_moment(some: Looked) -> None:
    found = asynchrony.asynchrony(some.reading)["in_flight"]
    assert 10 < len(found) <= 500
    for point in found:
        assert point["in_flight"] == len(some.told.open_at(point["at_s"]))


# --- workers ---------------------------------------------------------------------------------------------------------


def test_a_worker_is_what_its_rows_say(some: Looked) -> None:
    found, told = workers.workers(some.reading, workers.WorkerQuery()), some.told
    assert (found["total"], found["page"], found["size"]) == (DEVICES, 1, 50)
    open_tasks = told.open_at(told.rows[-1].at)
    for worker in found["workers"]:
        mine = [row for row in told.rows if row.worker == worker["worker"]]
        decided = [row for row in mine if row.kind == "decided"]
        leased = {row.task for row in mine if row.kind == "leased"}
        assert worker["name"] == f"worker {worker['worker']}"
        assert worker["device"] == worker["worker"]
        assert worker["tasks"] == len(leased)
        assert worker["applied"] == sum(row.keep is not None for row in decided)
        assert worker["refused"] == told.rejected(decided)
        assert worker["mass"] == pytest.approx(told.mass(worker["worker"]))
        assert worker["seconds"] == pytest.approx(told.seconds(worker["worker"]))
        assert worker["state"] == ("working" if leased & open_tasks else "idle")
        assert worker["last_seen_s"] == max(row.at for row in mine if row.kind not in ("released",))
        assert worker["why"] is None


def test_whose_data_count_is_what_the_run_says(any_rule: Looked) -> None:
    mass = {w.number: w.mass for w in any_rule.reading.fleet.workers.values() if w.mass}
    assert mass == pytest.approx({device: mass for device, (mass, _) in any_rule.run.contribution.items()})


@pytest.mark.parametrize("sort", list(workers.COLUMNS))
@pytest.mark.parametrize("order", ["asc", "desc"])
def test_workers_are_sorted_and_paged(some: Looked, sort: str, order: str) -> None:
    def page(number: int, size: int) -> list[Any]:
        wanted = workers.WorkerQuery(sort=sort, order=order, page=number, size=size)
        return list(workers.workers(some.reading, wanted)["workers"])

    whole = page(1, 500)
    assert [worker for number in range(1, 5) for worker in page(number, 4)] == whole
    column = "worker" if sort == "worker" else sort
    values = [sum(w["refused"].values()) if sort == "refused" else w[column] for w in whole]
    known = [value for value in values if value is not None]
    assert known == sorted(known, reverse=order == "desc")
    assert values[len(known) :] == [None] * (len(values) - len(known))


def test_workers_are_found_by_text_and_state(some: Looked) -> None:
    def found(**wanted: Any) -> list[int]:
        return [w["worker"] for w in workers.workers(some.reading, workers.WorkerQuery(**wanted))["workers"]]

    assert found(text="WORKER 3") == [3]
    assert found(text="3") == [3]
    assert found(text="nobody") == []
    assert sorted(found(state="idle") + found(state="working")) == list(range(DEVICES))
    assert found(state="quarantined") == []


@pytest.mark.parametrize(
    "query", [{"sort": "x"}, {"order": "up"}, {"state": "x"}, {"page": "0"}, {"size": "501"}, {"text": "x" * 101}]
)
def test_a_wrong_question_is_refused(query: dict[str, str]) -> None:
    with pytest.raises(InvalidValue, match=next(iter(query))):
        workers.WorkerQuery.of(query)


# --- updates ---------------------------------------------------------------------------------------------------------


def all_updates(looked: Looked, size: int = 500, **wanted: Any) -> list[dict[str, Any]]:
    """Page by page."""
    found: list[dict[str, Any]] = []
    before = NUMBER_MAX
    while True:
        page = update_list.updates(looked.reading, update_list.UpdateQuery(before=before, size=size, **wanted))
        found += page["updates"]
        if page["next_before"] is None:
            return found
        assert len(page["updates"]) == size
        assert page["next_before"] < before
        before = page["next_before"]


def test_updates_are_the_ledgers_newest_first(some: Looked) -> None:
    decided = some.told.kind("decided")
    assert [update["sequence"] for update in all_updates(some)] == [row.sequence for row in reversed(decided)]
    by_sequence = {row.sequence: row for row in decided}
    for update in all_updates(some):
        row = by_sequence[update["sequence"]]
        for name in ("task", "worker", "device", "tau", "t", "staleness", "outcome", "samples", "gradients"):
            assert update[name] == getattr(row, name), name
        assert (update["alpha_t"], update["leased_s"], update["arrived_s"]) == (row.new, row.granted_at, row.at)
        assert update["mixed_s"] == (some.told.published_at(row.t or 0) if row.keep is not None else None)
        assert update["name"] == f"worker {row.worker}"


@pytest.mark.parametrize("size", [1, 7, 100])
@pytest.mark.parametrize(
    "wanted",
    [{}, {"worker": "4"}, {"worker": "worker 4"}, {"outcome": "too_stale"}, {"worker": "2", "outcome": "applied"}],
)
def test_updates_are_filtered_and_paged(some: Looked, size: int, wanted: dict[str, str]) -> None:
    number = int(wanted["worker"].split()[-1]) if "worker" in wanted else None
    expected = [
        row.sequence
        for row in reversed(some.told.kind("decided"))
        if number in (None, row.worker) and wanted.get("outcome") in (None, row.outcome)
    ]
    assert [update["sequence"] for update in all_updates(some, size, **wanted)] == expected
    assert expected


def test_pushes_without_a_decision_can_be_found(any_rule: Looked) -> None:
    busy = any_rule.told.kind("busy")
    found = all_updates(any_rule, outcome="busy")
    assert [update["sequence"] for update in found] == [row.sequence for row in reversed(busy)]
    assert all(update["outcome"] == "busy" and update["t"] is None for update in found)
    if any_rule.reading.settings["mix_s"]:
        assert found


def test_updates_that_are_not_counted_yet_are_not_shown(tmp_path: Path) -> None:
    reading, seen = RunReader(tmp_path / "run"), list[int]()

    def look(simulation: Simulation) -> None:
        assert simulation.ledger is not None
        simulation.ledger.flush()
        if not seen and simulation.coordinator.t >= 20:
            reading.refresh()
            seen.append(reading.sequence)

    simulated(tmp_path / "run", look, executor="inline")
    newest = update_list.updates(reading, update_list.UpdateQuery())["updates"][0]["sequence"]
    assert newest <= seen[0] < rows_of(tmp_path / "run")[-1].sequence


def test_nobody_has_no_updates(some: Looked) -> None:
    assert all_updates(some, worker="nobody") == []
    assert all_updates(some, outcome="not_yours") == []


def test_the_story_of_a_task(some: Looked) -> None:
    applied = some.told.applied[20]
    found = update_list.story(some.reading, applied.task or 0)
    assert [line["kind"] for line in found["story"]] == ["leased", "arrived", "decided", "published"]
    leased, _, decided, published = found["story"]
    assert (leased["at_s"], decided["at_s"]) == (applied.granted_at, applied.at)
    assert leased["facts"]["tau"] == applied.tau
    assert decided["facts"]["alpha_t"] == applied.new
    assert decided["facts"]["outcome"] == "applied"
    assert published["facts"] == {"t": applied.t}
    lost = next(
        row for row in some.told.kind("released") if row.task not in {r.task for r in some.told.kind("decided")}
    )
    assert [line["kind"] for line in update_list.story(some.reading, lost.task or 0)["story"]] == ["leased", "released"]
    assert update_list.story(some.reading, 10**9)["story"] == []


# --- comparison ------------------------------------------------------------------------------------------------------


def test_runs_side_by_side(some: Looked, any_rule: Looked) -> None:
    parts = {"a": runs.part(some.reading, 2), "b": runs.part(any_rule.reading, 2)}
    found = runs.comparison(parts)
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    differ = {row["name"]: row["values"] for row in found["settings"]}
    one, other = (read_json(looked.folder / "settings.json") for looked in (some, any_rule))
    expected = {n for n in {*one, *other} - {"executor"} if one.get(n) != other.get(n)}
    assert set(differ) == expected
    assert differ["dropout"] == {"a": 0.1, "b": 0.0}
    results = {row["name"]: row["values"] for row in found["results"]}
    for name in ("t", "applied", "gradients", "staleness_mean", "virtual_s", "x"):
        assert results[name]["a"] == pytest.approx(read_json(some.folder / "summary.json")[name])
    assert found["curves"]["b"] == overview.overview(any_rule.reading)["curve"]
