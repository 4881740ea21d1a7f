"""A real server that is scraped, logged and tracked: what each of them says is what happened."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse

from offbeat.server.access import TOKENS, TokenBook
from offbeat.storage.ledger import CHATTER, Ledger
from offbeat.storage.rows import as_arrival
from offbeat.trackers.follower import Follower
from tests.server.serving import Running, Worker, serving
from tests.server.speaking import file_of, ones, refused, until
from tests.unit.test_event_log import as_logged
from tests.unit.test_trackers import Heard


def scraped(running: Running, path: str = "/v1/metrics") -> dict[tuple[str, str], float]:
    """Every sample by its name and its only label."""
    answer = running.call("GET", path)
    assert answer.status == 200, answer.body
    found = {}
    for family in parse(answer.body.decode()):
        for sample in family.samples:
            found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
    return found


def work(worker: Worker) -> None:
    for step in range(3):
        assert worker.work(step).status == 200
    bad = worker.lease()["task"]
    refused(worker.push(bad, file_of({"x": ones()["x"]})), 422, "wrong_layout")
    nan = file_of(ones(x=ones()["x"] * float("nan")))
    refused(worker.push(bad, nan), 422, "not_finite")
    refused(worker.push(bad, nan), 422, "not_finite")


def test_what_is_scraped_is_what_happened_also_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path, {"evaluate_every": 1}) as running:
        worker = Worker(running)
        work(worker)
        until(running.status, lambda status: status["metrics_t"] == 3)
        first = scraped(running)
        assert scraped(running, "/metrics").keys() == first.keys()
        size = running.server.run.updates.size
    assert first["offbeat_updates_total", "applied"] == 3
    assert first["offbeat_updates_total", "not_finite"] == 1
    assert (first["offbeat_updates_total", "bad"], first["offbeat_updates_total", "repeated"]) == (1, 1)
    assert first["offbeat_refusals_total", "not_finite"] == 2
    assert (first["offbeat_staleness_count", ""], first["offbeat_alpha_t_count", ""]) == (3, 3)
    assert first["offbeat_mixed_updates_total", ""] == 3
    assert 1 <= first["offbeat_mixing_seconds_count", ""] <= 3, "some may have been mixed in one pass"
    assert first["offbeat_fsync_seconds_count", "update"] == 4
    assert first["offbeat_fsync_seconds_count", "ledger"] > 4
    assert 1 <= first["offbeat_evaluation_seconds_count", ""] <= 4
    assert first["offbeat_sent_bytes_total", ""] == 3 * size
    assert first["offbeat_received_bytes_total", ""] > 4 * size - 100
    with serving(tmp_path, {"evaluate_every": 1}) as running:
        again = scraped(running)
        worker.running = running
        assert worker.work().status == 200
        more = scraped(running)
    kept = ("offbeat_updates_total", "offbeat_staleness_bucket", "offbeat_alpha_t_bucket", "offbeat_alpha_t_sum")
    assert {k: v for k, v in first.items() if k[0] in kept} == {k: v for k, v in again.items() if k[0] in kept}
    assert more["offbeat_updates_total", "applied"] == 4
    assert again["offbeat_sent_bytes_total", ""] == 0


def test_without_prometheus_client_the_server_runs_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with serving(tmp_path) as running:
        assert Worker(running).work().status == 200
        assert "offbeat[metrics]" in refused(running.call("GET", "/v1/metrics"), 501, "not_installed")["message"]


def test_events_are_logged(tmp_path: Path) -> None:
    with serving(tmp_path, log_events=str(tmp_path / "events.jsonl")) as running:
        work(Worker(running))
    told = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    for line in told:
        del line["logged_at"], line["run"]
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        assert told == [as_logged(row) for row in ledger.rows() if row.kind not in CHATTER]


def test_a_served_run_is_tracked_like_a_simulated_one(tmp_path: Path) -> None:
    sink: Any = Heard()
    follower = Follower(tmp_path / "run", [sink])
    with serving(tmp_path, {"evaluate_every": 1, "epochs": 4}) as running:
        worker = Worker(running)
        for _ in range(4):
            assert worker.work().status == 200
            follower.catch_up()
        until(lambda: (tmp_path / "run" / "summary.json").exists(), bool)
        assert follower.catch_up()
    assert [point.t for point in sink.points][-1] == 4
    assert [point.gradients for point in sink.points][-1] == 8
    assert [window.t for window in sink.windows] == [1, 2, 3, 4]
    assert sink.summary["t"] == 4


def test_where_there_are_tokens_a_scrape_needs_one(tmp_path: Path) -> None:
    book = TokenBook(tmp_path / "access" / TOKENS)
    with serving(tmp_path) as running:
        running.server.context.tokens = book
        for path in ("/metrics", "/v1/metrics"):
            refused(running.call("GET", path), 401, "no_token")


def test_where_the_time_of_a_task_went_is_kept_where_the_worker_says_it(tmp_path: Path) -> None:
    with serving(tmp_path) as running:
        worker = Worker(running)
        for seconds in ({"Offbeat-Download-S": "0.25", "Offbeat-Train-S": "1.5"}, {}):
            lease = worker.lease()
            data = worker.train(lease)
            path = f"/v1/tasks/{lease['task']}/update"
            assert running.call("PUT", path, data, worker.head(data) | seconds).status == 200
        lease = worker.lease()
        for wrong in ("-1", "soon", "nan", "inf", "1e10"):
            head = worker.head(data) | {"Offbeat-Train-S": wrong}
            assert "Offbeat-Train-S" in refused(running.call("PUT", path, data, head), 400, "bad_request")["message"]
    with Ledger.open(tmp_path / "run" / "ledger.sqlite", read_only=True) as ledger:
        told, silent = map(as_arrival, ledger.rows("arrived"))
    assert silent.spent is None
    assert told.spent is not None
    assert (told.spent.download_s, told.spent.train_s) == (0.25, 1.5)
    assert 0 < told.spent.upload_s < 30


def test_the_documented_metrics_are_there(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    documented = set(re.findall(r"`(offbeat_\w+)(?:\{(\w+)\})?`", text))
    assert len(documented) > 15
    with serving(tmp_path, {"evaluate_every": 1}) as running:
        work(Worker(running))
        until(running.status, lambda status: status["metrics_t"] == 3)
        families = list(parse(running.call("GET", "/metrics").body.decode()))
    labels = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    names = {family.name for family in families} | labels.keys()
    assert {name for name, _ in documented} <= names
    for name, label in documented:
        assert not label or any(label in found for each, found in labels.items() if each.startswith(name)), name
