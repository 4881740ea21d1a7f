"""Makes the virtual environment of a peer, once, and prints the path of its interpreter on the last line.

environments.py appfl|flower FOLDER. First comes torch, then the peer and all that it needs, at exact versions and
without their own requirements: the peers' pins pull gigabytes that the work here has no use for.
"""

import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
PINS = {"appfl": HERE / "constraints-appfl.txt", "flower": HERE.parents[1] / "constraints-flower.txt"}
"""Flower's pins are those that `offbeat.flower` is tested with."""
TORCH = "torch==2.13.0"


def made(peer: str, folder: Path) -> Path:
    """The interpreter of the peer's environment; an environment from other pins is made again."""
    place, pins = folder / peer, PINS[peer].read_text()
    python, ready = place / "bin" / "python", place / ".ready"
    if not ready.is_file() or ready.read_text() != pins:
        venv.create(place, with_pip=True, clear=True)
        _install(python, TORCH, "--constraint", str(PINS[peer]))
        _install(python, "--no-deps", "--requirement", str(PINS[peer]))
        ready.write_text(pins)
    return python


def _install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (pip)
    if done.returncode:
        raise SystemExit(f"pip install {' '.join(what)} failed: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PINS:
        raise SystemExit(__doc__)
    print(made(sys.argv[1], Path(sys.argv[2]).resolve()))
