"""Owns the shapes of the ledger's rows: which columns a row of a kind has."""

from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True, eq=False)
class RowShape:
    """The kind of a row and the columns that it has; there is one of each, compared by identity."""

    kind: str
    columns: tuple[str, ...]


class NewRow(NamedTuple):
    """A row to be written: its shape, and a value for each of the shape's columns."""

    shape: RowShape
    values: tuple[object, ...]

    @property
    def kind(self) -> str:
        return self.shape.kind

    def facts(self) -> dict[str, Any]:
        """The columns by name; those that do not apply are left out."""
        return dict(zip(self.shape.columns, self.values, strict=True))


def shape_of(kind: str, columns: str) -> RowShape:
    return RowShape(kind, tuple(columns.split()))


def lease_shapes(kind: str, columns: str) -> tuple[RowShape, RowShape]:
    """For a lease as it is mostly, and for one whose local iterations or gamma the scheduler set."""
    lease = "task worker device number tau granted_at deadline"
    return shape_of(kind, f"{columns} {lease}"), shape_of(kind, f"{columns} {lease} local_iterations gamma")
