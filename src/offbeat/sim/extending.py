"""Owns how a simulated run that is finished, or was interrupted, goes on to another end.

Rules kept here:
- A run's settings stay those that it began with. Another end is an event in its ledger, and a replay is led through it.
- A finished run keeps the vectors of the moment before its end: extended, it goes on as if it had never ended there.
- What is refused is refused before anything in the folder is changed.
"""

from pathlib import Path

from offbeat.errors import InvalidValue
from offbeat.method import as_begun, ends_of
from offbeat.protocol.ends import Ends
from offbeat.protocol.messages import RunExtended
from offbeat.settings import Settings
from offbeat.storage.json_file import read_json
from offbeat.storage.ledger import Ledger
from offbeat.storage.rows import as_event
from offbeat.storage.run_folder import CHECKPOINT, LEDGER, SETTINGS, SUMMARY

END_BYTES_MAX = 256 << 20
"""The most that the vectors of a finished run may take on the disk: every version in flight is among them."""


def settings_begun(settings: Settings, folder: Path | None) -> Settings:
    """The settings with the ends that the run in this folder began with, if it holds one."""
    if folder is None or not (folder / SETTINGS).is_file():
        return settings
    return as_begun(settings, read_json(folder / SETTINGS))


def is_extension(folder: Path, begun: Settings, ends: Ends) -> bool:
    """Is the run in this folder finished, and are these ends others than it had?"""
    if not (folder / SUMMARY).is_file() or not (folder / LEDGER).is_file():
        return False
    with Ledger.open(folder / LEDGER, read_only=True) as ledger:
        given = extensions_in(ledger)
    return ends != (Ends.said_by(given[-1]) if given else ends_of(begun))


def refuse_without_checkpoint(folder: Path) -> None:
    if not (folder / CHECKPOINT).is_file():
        raise InvalidValue(
            f"{folder} holds a finished run that cannot be extended, for it kept no checkpoint: it is part of a "
            f"comparison, of an earlier version, or its models in flight take more than {END_BYTES_MAX >> 20} MiB; "
            "run it anew with the later end in another folder"
        )


def extensions_in(ledger: Ledger, until: int | None = None) -> list[RunExtended]:
    """The ends that a run was given after it had begun, up to a row of its ledger."""
    rows = (row for row in ledger.rows("extended") if until is None or row.sequence <= until)
    return [event for event in map(as_event, rows) if isinstance(event, RunExtended)]
