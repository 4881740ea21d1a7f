"""A replay of a served FedAsync run that imports nothing of ours: SQLite, JSON, hashlib and numpy.

It reads x_0, the ledger's coefficients and the updates, and gives x_t and what was applied.
"""

import hashlib
import json
import sqlite3
from pathlib import Path

import numpy as np


def vector(path: Path) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """The float32 arrays of a safetensors file, one after the other."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + length])
    end = max(e["data_offsets"][1] for n, e in entries.items() if n != "__metadata__")
    return np.frombuffer(data[8 + length : 8 + length + end], np.float32).copy()


def replay(run: Path) -> tuple[str, dict[int, str]]:
    """sha256 of x_t, and the digest of every update that went into it, by task."""
    ledger = sqlite3.connect(f"{run.absolute().as_uri()}/ledger.sqlite?mode=ro", uri=True)
    arrived = ledger.execute("SELECT task, json_extract(detail, '$.digest') FROM events WHERE kind = 'arrived'")
    digests: dict[int, set[str]] = {}
    for task, digest in arrived:
        digests.setdefault(task, set()).add(digest)
    x, applied = vector(run / "x_0.safetensors"), {}
    rows = "SELECT task, keep, new FROM events WHERE kind = 'decided' AND keep IS NOT NULL ORDER BY decision"
    for task, keep, new in ledger.execute(rows).fetchall():
        file = run / "updates" / f"{task}.safetensors"
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert digest in digests[task], f"task {task} holds something else than was acknowledged"
        assert task not in applied, f"task {task} was applied twice"
        applied[task] = digest
        x = np.float32(keep) * x + np.float32(new) * vector(file)
    ledger.close()
    return hashlib.sha256(x.tobytes()).hexdigest(), applied
