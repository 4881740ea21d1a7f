"""Owns the ledger in other people's formats: CSV and Parquet, all columns, every bit of every number.

Rules kept here:
- The file is written whole or not at all, and never held in memory: a page of rows at a time.
- What does not apply is empty in CSV and null in Parquet; NaN is NaN in both.
"""

import csv
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, get_args, get_type_hints

from offbeat.errors import InvalidValue, MissingExtra
from offbeat.storage.disk import aside
from offbeat.storage.rows import Row
from offbeat.storage.run_folder import RunFolder

GROUP_ROWS = 50_000


def export_ledger(folder: Path, out: Path) -> int:
    """Write the ledger of a run to OUT.csv or OUT.parquet; answers how many rows it has."""
    formats: dict[str, Callable[[Iterator[Row], Path], int]] = {".csv": _write_csv, ".parquet": _write_parquet}
    write = formats.get(out.suffix.lower())
    if write is None:
        raise InvalidValue(f"cannot export to {out}: its name must end in {' or '.join(formats)}")
    with RunFolder.open(folder).ledger() as ledger, aside(out) as temporary:
        return write(ledger.rows(), temporary)


def _write_csv(rows: Iterator[Row], path: Path) -> int:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(Row._fields)
        count = 0
        for count, row in enumerate(rows, 1):  # noqa: B007 (the last one is the answer)
            writer.writerow(row)
        return count


def _write_parquet(rows: Iterator[Row], path: Path) -> int:
    arrow, parquet = _pyarrow()
    schema = arrow.schema([(name, _arrow_type(arrow, name)) for name in Row._fields])
    count = 0
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(islice(rows, GROUP_ROWS)):
            columns = zip(*group, strict=True)
            arrays = [arrow.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
            writer.write_table(arrow.table(arrays, schema=schema))
            count += len(group)
    return count


def _arrow_type(arrow: Any, name: str) -> Any:
    hint = get_type_hints(Row)[name]
    kind = next((part for part in get_args(hint) if part is not type(None)), hint)
    return {int: arrow.int64(), float: arrow.float64(), str: arrow.string()}[kind]


def _pyarrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError as error:
        raise MissingExtra("pyarrow", "parquet") from error
