"""Owns the comparison of a worker's journal with the ledger: is everything there that the worker was told?"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Outcome
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_arrival


def missing_in(ledger: Ledger, journal: Path, run: str) -> tuple[int, list[str]]:
    """How many acknowledgements of this run a journal has, and what of them the ledger does not bear out."""
    count, wrong = 0, list[str]()
    for line in _lines(journal):
        if line["run"] != run or line["outcome"] != Outcome.APPLIED.value:
            continue
        count += 1
        why = _why_not(ledger, line)
        if why:
            wrong.append(f"task {line['task']}: {why}")
    return count, wrong


def _why_not(ledger: Ledger, line: dict[str, Any]) -> str:
    applied = [row for row in ledger.rows("decided", task=line["task"]) if row.outcome == Outcome.APPLIED.value]
    if len(applied) != 1:
        return f"it was acknowledged as applied, and the ledger applied it {len(applied)} times"
    if line["digest"] not in {as_arrival(row).digest for row in ledger.rows("arrived", task=line["task"])}:
        return "the ledger has another update under this number"
    head = line.get("head", "")
    if head and ledger.chained and not ledger.select("SELECT 1 FROM commits WHERE head = ?", (bytes.fromhex(head),)):
        return "the ledger's chain does not have the head that came with the acknowledgement"
    return ""


def _lines(journal: Path) -> Iterator[dict[str, Any]]:
    try:
        for number, text in enumerate(journal.read_text("utf-8").splitlines(), 1):
            line = json.loads(text)
            if not isinstance(line, dict) or not {"run", "task", "digest", "outcome"} <= line.keys():
                raise InvalidValue(
                    f"{journal}:{number} is no line of a journal; give what `offbeat work --journal` wrote"
                )
            yield line
    except OSError as error:
        raise InvalidValue(f"cannot read {journal}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidValue(f"{journal} is no journal: {error}") from error
