"""Owns the benchmark of starting: how long a user waits for the help, and for the first epoch."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.results import Results
from benchmarks.scale import Scale
from benchmarks.turns import Tell, take_turns
from offbeat.errors import OffbeatError

COMMANDS = {"help": ("--help",), "first_epoch": ("simulate", "digits", "--epochs", "1")}


def run(results: Results, scale: Scale, tell: Tell, folder: Path) -> None:
    """Start each command several times; the first start, which fills caches, is not measured."""
    for arguments in COMMANDS.values():
        starts_per_s(arguments, folder)
    contestants = {name: partial(starts_per_s, arguments, folder) for name, arguments in COMMANDS.items()}
    turns = take_turns(contestants, scale.startup_turns, tell, "start-up")
    for name in COMMANDS:
        results.put(f"startup_{name}", 1 / turns.median(name))
    results.note("start-up, a Python that does nothing", 1 / starts_per_s(None, folder), "s")


def starts_per_s(arguments: tuple[str, ...] | None, folder: Path) -> float:
    """Runs per second of a command, each until its first line of output."""
    command = [sys.executable, *(("-c", "print()") if arguments is None else ("-m", "offbeat", *arguments))]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    log, begun = folder / "start.log", perf_counter()
    with log.open("wb") as errors:
        process = subprocess.Popen(  # noqa: S603 (our own)
            command, cwd=folder, env=kept | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=errors
        )
        with process:
            out: Any = process.stdout
            said = out.readline()  # a simulation prints its first line at its end
            took = perf_counter() - begun
            out.read()
    if process.returncode or not said:
        raise OffbeatError(f"offbeat {' '.join(arguments or ())} failed: {log.read_text().strip()[-300:]}")
    log.unlink()
    return 1 / took
