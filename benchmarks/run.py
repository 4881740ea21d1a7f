"""Owns a run of the benchmark: which parts are measured, in which order, and where their files go."""

import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bars import PARTS
from benchmarks.machine import Machine
from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.turns import Tell, silent
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError

MODULES = {"peers": "beside_peers"}
"""Parts whose module has another name: `peers` is the folder of the peers' scripts."""
EXTRAS = {
    "numba": "fast",
    "torch": "torch",
    "sklearn": "digits",
    "cloudpickle": "processes",
    "aiohttp": "serve",
    "cryptography": "serve",
    "psutil": "work",
}


class Bench(NamedTuple):
    """Results, and the machine that they are of."""

    results: Results
    machine: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return self.results.as_json(self.machine)


def bench(parts: Sequence[str], scale: Scale, folder: Path, *, peers: bool = False, tell: Tell = silent) -> Bench:
    """Run these parts one after the other; their files go under `folder`, and are removed afterwards."""
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        raise InvalidValue(f"there is no benchmark {unknown[0]!r}; use {', '.join(PARTS)} or all")
    machine, results = Machine(), Results(parts)
    ready = {part: _imported(part) for part in (*parts, *(("peers",) if peers else ()))}
    with _scratch(folder) as scratch:
        for part, run in ready.items():
            try:
                run(results, scale, tell, folder if part == "peers" else Path(scratch))
            except Exception as error:  # the figures before and after this part are kept
                kind = "" if isinstance(error, OffbeatError) else f"{type(error).__name__}: "
                results.give_up(part, f"{part}: {kind}{error}")
    for part in parts:
        results.close(part)
    return Bench(results, machine.facts())


def _scratch(folder: Path) -> "tempfile.TemporaryDirectory[str]":
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(prefix="scratch-", dir=folder, ignore_cleanup_errors=True)
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error


def _imported(part: str) -> Callable[[Results, Scale, Tell, Path], None]:
    """The benchmark of a part; a library that is missing is named with the extra that installs it."""
    try:
        module = import_module(f"benchmarks.{MODULES.get(part, part)}")
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            raise MissingExtra(error.name, EXTRAS[error.name]) from error
        raise
    run: Callable[[Results, Scale, Tell, Path], None] = module.run
    return run
