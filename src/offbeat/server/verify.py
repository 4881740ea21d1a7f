"""Owns the verification of a run from its files: the chain, the replay, the journals; and what of it did not hold.

Rules kept here:
- It says what it did: how many decisions were checked, how many updates were replayed, and from which epoch.
- It only reads, runs no code of the task, and may look at a run that is being served.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue
from offbeat.server.journal_check import missing_in
from offbeat.server.replay import Replay, reached, sha256, start_of
from offbeat.server.update_store import NO_LIMIT
from offbeat.storage.backup_marker import MARKER, forks_in, read_marker
from offbeat.storage.chain_check import check_chain
from offbeat.storage.checkpoints import checkpoint_heads
from offbeat.storage.head_file import HEAD, read_head
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import NO_ROW, Ledger
from offbeat.storage.run_folder import FINAL, LEDGER, SUMMARY, RunFolder, file_digest
from offbeat.wire import mapped

Facts = dict[str, Any]


def verify(folder: Path, journal: Path | None = None) -> Facts:
    """Check the chain, replay from as far back as updates are kept, and compare with what is there, bit for bit."""
    RunFolder.open(folder)
    parts = [
        _chain(folder),
        _backup(folder),
        _replayed(folder) if (folder / "layout.json").is_file() else _simulated(folder),
    ]
    if journal is not None:
        parts.append(_journal(folder, journal))
    wrong = [sentence for part in parts for sentence in part.pop("wrong")]
    facts = {name: value for part in parts for name, value in part.items()}
    return {**facts, "wrong": wrong, "agrees": not wrong}


def _chain(folder: Path) -> Facts:
    """Is every lasting row the one that was written, and is this the ledger that other files of the run know?"""
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        if not ledger.chained:
            return {"decisions": ledger.count("decided"), "chain": "none", "wrong": []}
        check = check_chain(ledger)
        losses = [json.loads(row.detail or "{}")["what"] for row in ledger.rows("loss_accepted")]
        facts = {"decisions": check.decisions, "head": check.head.hex(), "losses": losses, "forks": forks_in(ledger)}
        if check.broken is not None:
            return facts | {"chain": "broken", "broken": str(check.broken), "wrong": [f"the chain: {check.broken}"]}
        return facts | {"chain": "whole", "wrong": list(_unknown_heads(folder, ledger))}


def _backup(folder: Path) -> Facts:
    marker = read_marker(folder)
    return {"backup": None if marker is None else asdict(marker), "wrong": []}


def _unknown_heads(folder: Path, ledger: Ledger) -> Iterator[str]:
    """Heads that other files of the run name, and that this ledger does not have there."""
    told = read_head(folder)
    if told is None and (folder / HEAD).is_file():
        yield f"{folder / HEAD} is damaged; the next start of the server writes it anew"
    if told is not None and ledger.head_at(told.row) != told.head:
        yield f"the ledger had another head at row {told.row}: rows at its end are missing"
    for fork in forks_in(ledger):
        if ledger.head_at(fork["row"]).hex() != fork["head"]:
            yield f"the run was forked at row {fork['row']} of a ledger with other rows"
    marker = read_marker(folder)
    if marker is not None and ledger.head_at(marker.row).hex() != marker.head:
        yield f"{folder / MARKER} is of a ledger with other rows: some up to row {marker.row} are missing"
    for mark, head in checkpoint_heads(folder / "checkpoints"):
        if head and ledger.head_at(mark).hex() != head:
            yield f"checkpoint {mark} is of a ledger with other rows"
    summary = RunFolder.open(folder).summary or {}
    if summary.get("ledger_head") not in (None, ledger.head_at(NO_ROW).hex()):
        yield f"{folder / SUMMARY} is of a ledger with other rows: some at its end are missing"


def _replayed(folder: Path) -> Facts:
    with closing(Replay(folder)) as replay:
        newest, *older = list(replay.checkpoints.usable()) or [replay.checkpoints.newest()]  # which says what is wrong
        oldest = replay.beginning() or (older[-1] if older else newest)
        running = replay.about.state == "running"
        until = newest.mark if running else NO_LIMIT
        there = start_of(newest) if running else replay.run(newest)
        again = replay.run(oldest, until)
        kept = KeptResult.found(replay, there.t)
        final = (folder / FINAL).is_file() and kept is None
        x = mapped(folder / FINAL, replay.layout) if final else there.x
    theirs, ours, began = sha256(x), sha256(again.x), start_of(oldest)
    same = theirs == ours and (there.t, there.applied) == (again.t, again.applied)
    wrong = [f"the replay ends at epoch {again.t} with {ours}, the run at epoch {there.t} with {theirs}"] * (not same)
    wrong += [f"{kept.compared}: they differ"] if kept and not kept.agrees else []
    what = "x.safetensors" if final else "the newest version, from the newest checkpoint on,"
    compared = f"{what} with a replay from epoch {began.t}" + (f"; {kept.compared}" if kept else "")
    counted: Facts = {
        "t": again.t,
        "applied": again.applied,
        "replayed": again.applied - began.applied,
        "from": began.t,
    }
    counted |= {"decided": again.applied, "compared": compared}
    return counted | {"x_sha256": theirs, "replay_sha256": ours, "wrong": wrong}


class KeptResult(NamedTuple):
    """The version that reached the target of a finished run, where newer ones came after it."""

    agrees: bool
    compared: str

    @classmethod
    def found(cls, replay: Replay, newest: int) -> Self | None:
        """Compare x.safetensors with a replay of its version or, where its updates are gone, with the summary."""
        summary = replay.about.summary or {}
        t = summary.get("result_t", newest)
        if t == newest:
            return None
        theirs = sha256(mapped(replay.folder / FINAL, replay.layout))
        try:
            ours, other = sha256(reached(replay, t)), f"a replay of version {t}, which reached the target"
        except InvalidValue:
            ours, other = summary["x_sha256"], f"the summary's digest of version {t}, whose updates are gone"
        return cls(theirs == ours == summary["x_sha256"], f"x.safetensors with {other}")


def _simulated(folder: Path) -> Facts:
    """A simulation keeps no updates: its model is compared with what its summary says."""
    summary = RunFolder.open(folder).summary
    if summary is None:
        return {"t": None, "replayed": 0, "from": None, "wrong": []}
    known = summary.get("file_sha256")
    wrong = (
        [f"{folder / FINAL} is not the file that the run wrote"]
        if known not in (None, file_digest(folder / FINAL))
        else []
    )
    return {"t": summary.get("t"), "replayed": 0, "from": None, "x_sha256": summary.get("x_sha256"), "wrong": wrong}


def _journal(folder: Path, journal: Path) -> Facts:
    if not (folder / "run.json").is_file():
        raise InvalidValue(f"{folder} is not the folder of a served run: only those have workers with journals")
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        count, wrong = missing_in(ledger, journal, read_json(folder / "run.json")["run"])
    return {"journal": count, "wrong": wrong}


def sentence(facts: Facts) -> str:
    """What was done, and what came out, in words."""
    chain = {
        "whole": "in an unbroken chain",
        "broken": "in a BROKEN chain",
        "none": "without a chain (an older ledger)",
    }
    said = f"Checked {facts['decisions']:,} decisions {chain[facts['chain']]}"
    if facts["from"] is None:
        said += "; a simulation keeps no updates to replay" + (
            ": its model is the one in its summary" if facts["t"] is not None else ", and this one is not finished"
        )
    elif facts["replayed"]:
        said += f"; replayed {facts['replayed']:,} updates from epoch {facts['from']}"
        said += ": the same bits" if facts["agrees"] else ""
    else:
        said += f"; no update is kept to replay: the model is that of the checkpoint at epoch {facts['from']}"
    said += f"; {facts['journal']:,} acknowledgements of the journal looked up" if "journal" in facts else ""
    lines = [f"{said}.", *_origin(facts), *(f"WRONG: {wrong}." for wrong in facts["wrong"])]
    return "\n".join([*lines, *(f"A loss was accepted: {what}." for what in facts.get("losses", ()))])


def _origin(facts: Facts) -> Iterator[str]:
    """Where a run comes from that is a backup, or was one."""
    for fork in facts.get("forks", ()):
        yield f"This is run {fork['fork']}, forked from a backup of {_named(fork)} at row {fork['row']:,}."
    backup = facts.get("backup")
    if backup is not None:
        yield f"A backup of {_named(backup)} up to row {backup['row']:,}, taken at {backup['at']}."


def _named(origin: Facts) -> str:
    return f"run {origin['run']}" if origin["run"] else "a run"
