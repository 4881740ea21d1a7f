"""Exported ledgers hold every column of every row; they are written whole or not at all."""

import csv
import sys
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from offbeat.core.rules import Mix
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.protocol.messages import (
    AnswerPush,
    Decision,
    Evaluated,
    FleetJoined,
    Lease,
    Outcome,
    SendTask,
    UpdateArrived,
    VersionPublished,
)
from offbeat.storage import export
from offbeat.storage.export import export_ledger
from offbeat.storage.rows import Row
from offbeat.storage.run_folder import RunFolder

LEASE = Lease(7, 3, 5, 2, 11, 1 / 3, inf, None, 0.1)
DECISION = Decision(1, 2 / 3, LEASE, Outcome.APPLIED, 12, 0, Mix(0.1 + 0.2, 1 - 1 / 3, 5e-324, False), 50, 10)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with RunFolder.begin(tmp_path / "run", {"seed": 1}) as folder:
        ledger = folder.ledger()
        ledger.record(FleetJoined(0.0, 9), [SendTask(LEASE)])
        ledger.record(UpdateArrived(2 / 3, 3, 7, 50, 10, distance=nan), [])
        ledger.record(UpdateArrived(2 / 3, 3, 7, 50, 10), [AnswerPush(3, 7, Outcome.APPLIED, DECISION)])
        ledger.record(Evaluated(1.0, 12, {'a "name", with\nall': 0.1, "loss": nan}), [])
        for t in range(13, 30):
            ledger.record(VersionPublished(t / 3, t), [])
    return tmp_path / "run"


def rows(run: Path) -> list[Row]:
    with RunFolder.open(run).ledger() as ledger:
        return list(ledger.rows())


def test_csv_holds_everything(run: Path, tmp_path: Path) -> None:
    expected = rows(run)
    assert export_ledger(run, tmp_path / "l.csv") == len(expected) == 23
    with (tmp_path / "l.csv").open(newline="", encoding="utf-8") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == Row._fields
    assert lines == [["" if value is None else str(value) for value in row] for row in expected]
    decided = dict(zip(header, next(line for line in lines if line[2] == "decided"), strict=True))
    assert [float(decided[name]) for name in ("keep", "new", "base")] == [0.1 + 0.2, 1 - 1 / 3, 5e-324]
    assert (decided["deadline"], decided["publish"], decided["distance"]) == ("inf", "0", "")
    assert "nan" in {line[header.index("distance")] for line in lines}


def test_parquet_holds_everything(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet: Any = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(export, "GROUP_ROWS", 5)
    expected = rows(run)
    assert export_ledger(run, tmp_path / "l.PARQUET") == len(expected)
    file = parquet.ParquetFile(tmp_path / "l.PARQUET")
    assert file.num_row_groups == 5  # a bounded number of rows at a time
    table = file.read()
    found = [tuple(row[name] for name in Row._fields) for row in table.to_pylist()]
    assert repr(found) == repr([tuple(row) for row in expected])  # as text, for NaN is not equal to NaN
    types = {field.name: str(field.type) for field in table.schema}
    assert (types["sequence"], types["at"], types["kind"], types["keep"]) == ("int64", "double", "string", "double")
    assert (types["local_iterations"], types["outcome"]) == ("int64", "string")  # also where all are null


@pytest.mark.parametrize("name", ["l.csv", "l.parquet"])
def test_a_run_without_rows_has_columns(tmp_path: Path, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with RunFolder.begin(tmp_path / "run", {}) as folder:
        folder.ledger()
        assert export_ledger(tmp_path / "run", tmp_path / name) == 0  # also while it runs
    assert (tmp_path / name).stat().st_size > 0


def test_an_older_export_is_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "l.csv").write_text("old")
    export_ledger(run, tmp_path / "l.csv")
    assert (tmp_path / "l.csv").read_text().startswith("sequence,at,kind,")


def test_reading_leaves_the_run_as_it_was(run: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in run.iterdir()}
    export_ledger(run, tmp_path / "l.csv")
    assert {file.name: file.read_bytes() for file in run.iterdir()} == before


@pytest.mark.parametrize("name", ["l", "l.xlsx", "csv", "l.csv.gz"])
def test_other_formats_are_refused(run: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidValue, match=r"its name must end in \.csv or \.parquet"):
        export_ledger(run, tmp_path / name)
    assert not (tmp_path / name).exists()


def test_without_pyarrow_it_says_what_to_install(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"pyarrow is not installed; run: pip install 'offbeat\[parquet\]'"):
        export_ledger(run, tmp_path / "l.parquet")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="is not the folder of a run"):
        export_ledger(tmp_path, tmp_path / "l.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["l.csv", "l.parquet"])
@pytest.mark.parametrize("folder", ["nowhere", "run/settings.json"])
def test_where_nothing_can_be_written_it_is_one_line(run: Path, tmp_path: Path, folder: str, name: str) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    with pytest.raises(OffbeatError, match="cannot write") as refused:
        export_ledger(run, tmp_path / folder / name)
    assert "\n" not in str(refused.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_an_export_that_breaks_off_leaves_nothing(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(rows: Any, path: Path) -> int:
        path.write_text(str(next(rows)))
        raise KeyboardInterrupt

    monkeypatch.setattr(export, "_write_csv", breaks)
    with pytest.raises(KeyboardInterrupt):
        export_ledger(run, tmp_path / "l.csv")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]
