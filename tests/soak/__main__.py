"""Owns `python -m tests.soak`: kills, stalls and lies for a while, then numbers, a picture, and status 0 or 1."""

import argparse
import shutil
import sys
import time
from pathlib import Path
from random import SystemRandom

from tests.soak import report
from tests.soak.soak import Soak, SoakSettings


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long processes are killed (default 3600)")
    parser.add_argument("--seed", type=int, help="what happens to whom, and when (default: another one each time)")
    parser.add_argument("--dir", type=Path, help="a new folder (default: runs/soak-DATE-TIME)")
    parser.add_argument("--parameters", type=int, default=100, help="of the model; 250000 are 1 MB (default 100)")
    parser.add_argument("--workers", type=int, default=10, help="honest ones; two liars come on top (default 10)")
    parser.add_argument("--training-s", type=float, default=0.25, help="what a training takes on average")
    parser.add_argument("--keep", action="store_true", help="keep the run and the logs also where nothing went wrong")
    given = parser.parse_args(arguments)
    seed = SystemRandom().randrange(10**6) if given.seed is None else given.seed
    settings = SoakSettings(
        given.seconds, seed, workers=given.workers, parameters=given.parameters, training_s=given.training_s
    )
    folder: Path = given.dir or Path("runs") / time.strftime("soak-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    return soaked(folder, settings, keep=given.keep)


def soaked(folder: Path, settings: SoakSettings, *, keep: bool) -> int:
    _tell(f"soak of {settings.seconds:g} s with seed {settings.seed} in {folder}")
    soak = Soak((folder / "fleet").absolute(), settings, _tell)
    soak.run()
    facts = report.write(soak, folder)
    sys.stdout.write(report.markdown(facts))
    _tell(f"numbers, table and picture: {folder / 'soak.json'}, soak.md, soak.png")
    if soak.failure:
        _tell(f"FAILED with seed {settings.seed}: {soak.failure[0]}\nThe run and all logs are in {folder / 'fleet'}.")
        return 1
    if not keep:
        shutil.rmtree(folder / "fleet")
    return 0


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
