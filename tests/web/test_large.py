"""5,000 workers and 100,000 updates: how large answers are, whether they are right, what an open page costs.

Seconds are measured by benchmarks/page.py.
"""

from collections import Counter
from pathlib import Path
from time import process_time
from typing import Any

import pytest

from offbeat.settings import Settings
from offbeat.sim.run import Simulation
from offbeat.storage.ledger import Ledger
from offbeat.storage.row_shapes import NewRow, RowShape
from offbeat.storage.rows import KINDS, Row
from offbeat.web import asynchrony, overview, update_list, workers
from offbeat.web.run_reader import RunReader
from offbeat.web.run_watch import PackedJson
from tests.simulation.quadratic import Quadratic
from tests.web.looking import Told, opened, page_of, rows_of

COLUMNS = tuple(name for name in Row._fields if name not in ("sequence", "kind"))
SHAPES = {kind: RowShape(kind, COLUMNS) for kind in KINDS}
DEVICES, EPOCHS = 5_000, 100_000
FIRST_LOOK_MIN = 5
"""A first look counts everything: it costs at least so many times what a later one costs; about 20 in fact."""
BYTES_MAX = 1 << 20
TWINS = (
    *("/overview.json", "/asynchrony.json", "/workers.json?size=500", "/workers.json?sort=seconds&order=desc"),
    *("/updates.json?size=500", "/updates.json?worker=77", "/updates.json?outcome=too_stale"),
    "/updates.json?worker=77&outcome=too_stale",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "run"
    task = Quadratic([device / DEVICES for device in range(DEVICES)], [0.5] * DEVICES)
    settings = Settings(
        epochs=EPOCHS,
        evaluate_every=50,
        executor="inline",
        in_flight_max=500,
        staleness_policy="reject",
        staleness_max=1500,
    )
    Simulation.of(task, settings, folder=folder).run()
    return folder


@pytest.mark.slow
def test_answers_are_small(folder: Path) -> None:
    with opened(page_of(folder)) as visitor:
        assert visitor.get("/overview.json")["applied"] == EPOCHS
        for twin in TWINS:
            answer = visitor.call("GET", twin)
            assert (answer.status, len(answer.body) < BYTES_MAX) == (200, True), (twin, len(answer.body))


@pytest.mark.slow
def test_every_number_is_right(folder: Path) -> None:
    reading, told = RunReader(folder), Told(rows_of(folder))
    reading.refresh()
    found, drawn = overview.overview(reading), asynchrony.asynchrony(reading)
    assert found["rejected"] == told.rejected()
    assert found["staleness_mean"] * EPOCHS == pytest.approx(sum(row.staleness or 0 for row in told.applied))
    assert (len(found["curve"]), found["curve"][0]["t"], found["curve"][-1]["t"]) == (500, 0, EPOCHS)
    for entry in drawn["staleness"]:
        assert entry["count"] == sum(n for u, n in told.staleness.items() if entry["from"] <= u < entry["to"])
    assert len(drawn["staleness"]) <= 100
    assert len(drawn["weights"]) <= 1000
    assert sum(weight["count"] for weight in drawn["weights"]) == EPOCHS
    assert len(drawn["timeline"]["tasks"]) <= 1500
    assert len(drawn["timeline"]["workers"]) == 60
    assert len(drawn["in_flight"]) == 500
    tasks = Counter(row.worker for row in told.kind("leased"))
    applied = Counter(row.worker for row in told.applied)
    pages = (workers.workers(reading, workers.WorkerQuery(page=page, size=500)) for page in range(1, 11))
    everybody = [worker for page in pages for worker in page["workers"]]
    assert {w["worker"]: (w["tasks"], w["applied"]) for w in everybody} == {
        number: (tasks[number], applied[number]) for number in range(DEVICES)
    }


@pytest.mark.slow
def test_an_open_page_costs_little(folder: Path, tmp_path: Path) -> None:
    """The ledger grows by the newest 5,000 updates, 100 a second; each second every view is worked out once."""
    rows = rows_of(folder)
    live = tmp_path / "run"
    live.mkdir()
    (live / "settings.json").write_bytes((folder / "settings.json").read_bytes())
    keep = [row for row in rows if row.kind == "decided"][-2_000].sequence
    (live / "ledger.sqlite").write_bytes((folder / "ledger.sqlite").read_bytes())
    with Ledger.open(live / "ledger.sqlite") as ledger:
        ledger.truncate_after(keep)
        reading = RunReader(live)
        first = _looked(reading)
        later = [row for row in rows if row.sequence > keep]
        seconds, share = 20, len(later) // 20
        spent = 0.0
        for second in range(seconds):
            _append(ledger, later[second * share : (second + 1) * share])
            spent += _looked(reading)
    assert reading.fold.applied > EPOCHS - 200
    assert first > FIRST_LOOK_MIN * spent / seconds


def _append(ledger: Ledger, rows: list[Any]) -> None:
    for row in rows:
        ledger._waiting.append(NewRow(SHAPES[row.kind], tuple(getattr(row, name) for name in COLUMNS)))
    ledger.flush()


def _looked(reading: RunReader) -> float:
    """Seconds of a processor for one look at the heaviest view, and at the overview."""
    begun = process_time()
    reading.refresh(0.0)
    PackedJson.of(overview.overview(reading))
    PackedJson.of(asynchrony.asynchrony(reading))
    PackedJson.of(update_list.updates(reading, update_list.UpdateQuery(worker="77")))
    return process_time() - begun
