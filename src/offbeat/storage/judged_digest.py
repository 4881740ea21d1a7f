"""Owns the question which bytes a task was answered for."""

import json
from pathlib import Path

from offbeat.storage.ledger import Ledger


def digest_judged(path: Path, task: int) -> str:
    """The digest of the update on which the answer to a task was decided; empty where none was recorded."""
    query = (
        "SELECT detail FROM events WHERE task = ? AND kind = 'arrived' AND sequence < "
        "(SELECT min(sequence) FROM events WHERE task = ? AND kind = 'decided') ORDER BY sequence DESC LIMIT 1"
    )
    with Ledger.open(path, read_only=True) as ledger:
        found = ledger.select(query, (task, task))
    detail = json.loads(found[0][0]) if found and found[0][0] else {}
    return str(detail.get("digest", ""))
