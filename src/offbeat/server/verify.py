"""Owns the verification of a run from its files: digests, chain, replay, journals; and what of it did not hold.

Rules kept here:
- It says what it did: how many decisions were checked, how many updates were replayed, and from which epoch.
- It only reads, runs no code of the task, and may look at a run that is being served.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, Self

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.server.continuity import NONSENSE
from offbeat.server.file_check import damaged_files
from offbeat.server.journal_check import missing_in
from offbeat.server.replay import Replay, ReplayPoint, reached, sha256, start_of
from offbeat.server.update_store import NO_LIMIT
from offbeat.storage.backup_marker import MARKER, forks_in, read_marker
from offbeat.storage.chain_check import check_chain, check_chatter, damaged_pages
from offbeat.storage.checkpoints import checkpoint_heads
from offbeat.storage.head_file import HEAD, read_head
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import NO_ROW, Ledger
from offbeat.storage.run_folder import AVERAGE, FINAL, LEDGER, SETTINGS, SUMMARY, RunFolder
from offbeat.wire import mapped

Facts = dict[str, Any]


def verify(folder: Path, journal: Path | None = None) -> Facts:
    """Check files and chain, replay from as far back as updates are kept, and compare with what is there."""
    if not (folder / SETTINGS).is_file():
        RunFolder.open(folder)  # which says what is missing
    served = any((folder / name).is_file() for name in ("layout.json", "run.json"))
    parts = [{"wrong": list(damaged_files(folder))}]
    parts.append(_part(folder, _chain, {"decisions": 0, "chain": "broken"}))
    parts.append(_part(folder, _backup, {"backup": None}))
    parts.append(_part(folder, _replayed if served else _simulated, {"t": None, "replayed": 0, "from": None}))
    if journal is not None:
        parts.append(_journal(folder, journal))
    wrong = list(dict.fromkeys(sentence for part in parts for sentence in part.pop("wrong")))
    facts = {name: value for part in parts for name, value in part.items()}
    return {**facts, "wrong": wrong, "agrees": not wrong}


def _part(folder: Path, check: Callable[[Path], Facts], otherwise: Facts) -> Facts:
    """What a check found; where damage kept it from its end, that is what it found."""
    try:
        return check(folder)
    except OffbeatError as error:
        return otherwise | {"wrong": [str(error)]}
    except NONSENSE as error:
        why = f"{folder / LEDGER} cannot be followed: {type(error).__name__}: {error}"
        return otherwise | {"wrong": [why]}


def _chain(folder: Path) -> Facts:
    """Is every row the one that was written, and is this the ledger that other files of the run know?"""
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        return ledger_facts(folder, ledger)


def ledger_facts(folder: Path, ledger: Ledger) -> Facts:
    """What is in a ledger, and what is wrong with it."""
    wrong = [f"the file {folder / LEDGER} is damaged: {said}" for said in damaged_pages(ledger)]
    if not ledger.chained:
        return {"decisions": ledger.count("decided"), "chain": "none", "wrong": wrong}
    check, chatter = check_chain(ledger), check_chatter(ledger)
    wrong += [f"the ledger's {chatter}"] if chatter is not None else []
    facts: Facts = {"decisions": check.decisions, "head": check.head.hex()}
    if check.broken is not None:
        wrong.append(f"the chain of the ledger: {check.broken}")
        return facts | {"chain": "broken", "broken": str(check.broken), "wrong": wrong}
    facts["forks"] = forks_in(ledger)
    facts |= {"losses": [json.loads(row.detail or "{}")["what"] for row in ledger.rows("loss_accepted")]}
    return facts | {"chain": "whole", "wrong": [*wrong, *_unknown_heads(folder, ledger)]}


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
        until, began = newest.mark if running else NO_LIMIT, start_of(oldest)
        there = start_of(newest) if running else replay.run(newest)
        kept = KeptResult.found(replay, there.t)
        final = (folder / FINAL).is_file() and kept is None
        theirs = sha256(mapped(folder / FINAL, replay.layout) if final else there.x)
        average = _average_sha256(replay, there)
        stood, there = (there.t, there.applied), began  # its model goes, before another one is made
        again = replay.run(oldest, until)
        ours, mean = sha256(again.x), replay.mean_of(again.standing)
        wrong = (
            [] if mean is None or sha256(mean) == average else [f"the averaged model is {average}, not the replay's"]
        )
    same = theirs == ours and stood == (again.t, again.applied)
    wrong += [f"the replay ends at epoch {again.t} with {ours}, the run at epoch {stood[0]} with {theirs}"] * (not same)
    wrong += [f"{replay.versions.file(t)} is not the version that a replay gives" for t in sorted(replay.unlike)]
    wrong += [f"{kept.compared}: they differ"] if kept and not kept.agrees else []
    what = "x.safetensors" if final else "the newest version, from the newest checkpoint on,"
    compared = f"{what} with a replay from epoch {began.t}" + (f"; {kept.compared}" if kept else "")
    counted: Facts = {
        "t": again.t,
        "applied": again.applied,
        "replayed": again.applied - began.applied,
        "from": began.t,
    }
    counted |= {"decided": again.applied, "compared": compared + ("; likewise the averaged model" if average else "")}
    return counted | {"x_sha256": theirs, "replay_sha256": ours, "wrong": wrong}


def _average_sha256(replay: Replay, newest: ReplayPoint) -> str | None:
    """The averaged model of the newest version: the file of a finished run, or that of the newest checkpoint on."""
    summary, mean = replay.about.summary or {}, replay.mean_of(newest.standing)
    if mean is not None and summary.get("average_t") == newest.t:
        mean = mapped(replay.folder / AVERAGE, replay.layout)
    return None if mean is None else sha256(mean)


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
        theirs, same_mean = sha256(mapped(replay.folder / FINAL, replay.layout)), True
        try:
            standing = reached(replay, t)
            ours, other = sha256(standing.x), f"a replay of version {t}, which reached the target"
            mean = replay.mean_of(standing)
            if mean is not None and summary.get("average_t") == t:
                same_mean = sha256(mean) == sha256(mapped(replay.folder / AVERAGE, replay.layout))
        except InvalidValue:
            ours, other = summary["x_sha256"], f"the summary's digest of version {t}, whose updates are gone"
        return cls(theirs == ours == summary["x_sha256"] and same_mean, f"x.safetensors with {other}")


def _simulated(folder: Path) -> Facts:
    """A simulation keeps no updates: its model is compared with what its summary says."""
    summary = RunFolder.open(folder).summary
    if summary is None:
        return {"t": None, "replayed": 0, "from": None, "wrong": []}
    return {"t": summary.get("t"), "replayed": 0, "from": None, "x_sha256": summary.get("x_sha256"), "wrong": []}


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
    if facts["from"] is None and facts["wrong"]:
        said += "; nothing was replayed"
    elif facts["from"] is None:
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
