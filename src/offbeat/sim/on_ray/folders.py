"""Owns how the folder of a run travels between a node and the driver.

Rules kept here:
- A folder travels whole, without its lock; half a folder is never seen: it is written aside and takes the place of
  what was there.
- Where a run was on a node concerns nobody: its summary names the folder that it has here.
"""

import shutil
from pathlib import Path

from offbeat.errors import InvalidValue
from offbeat.storage.disk import SUFFIX, cannot_write
from offbeat.storage.json_file import read_json, write_json
from offbeat.storage.lock import is_held
from offbeat.storage.run_folder import LOCK, SUMMARY

Files = dict[str, bytes]
"""Names and contents."""


def packed_folder(folder: Path) -> Files:
    """The files of a run; none where it has not begun. Refused while some process writes them."""
    if not folder.is_dir():
        return {}
    if is_held(folder / LOCK):
        raise InvalidValue(f"{folder} is being written by another process; wait for it, or choose another --dir")
    files = (path for path in folder.iterdir() if path.is_file())
    return {path.name: path.read_bytes() for path in files if path.name != LOCK and not path.name.endswith(SUFFIX)}


def unpack(files: Files, folder: Path) -> None:
    """Write them to a new folder; nothing where there are none."""
    if files:
        folder.mkdir(parents=True)
    for name, contents in files.items():
        if Path(name).name != name:
            raise InvalidValue(f"{name!r} is not the name of a file of a run")
        (folder / name).write_bytes(contents)


def arrived(files: Files, folder: Path) -> None:
    """A run has come back: its folder is this one now."""
    coming, going = (folder.with_name(f".{folder.name}-{word}") for word in ("coming", "going"))
    try:
        for leftover in (coming, going):
            shutil.rmtree(leftover, ignore_errors=True)
        unpack(files, coming)
        if SUMMARY in files:
            write_json(coming / SUMMARY, {**read_json(coming / SUMMARY), "dir": str(folder)})
        if folder.exists():
            folder.rename(going)
        coming.rename(folder)
        shutil.rmtree(going, ignore_errors=True)
    except OSError as error:
        raise cannot_write(folder, error) from error
