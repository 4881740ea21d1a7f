"""Owns the way from what the ledger holds to what JSON can say."""

import json
from math import isfinite
from typing import Any


def said(value: Any) -> Any:
    """What JSON has no word for is null, on whatever level; the storage's "nan" and "inf" are numbers again.

    >>> said({"loss": "nan", "deadline": float("inf"), "name": "inf-7", "t": 3})
    {'loss': None, 'deadline': None, 'name': 'inf-7', 't': 3}
    """
    if isinstance(value, dict):
        return {name: said(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [said(inner) for inner in value]
    if isinstance(value, float) and not isfinite(value):
        return None
    return None if value in ("nan", "inf", "-inf") else value


def metrics_of(detail: str) -> dict[str, float | None]:
    """The metrics in the `detail` of an evaluation."""
    return {
        name: None if said(value) is None else float(value) for name, value in json.loads(detail)["metrics"].items()
    }
