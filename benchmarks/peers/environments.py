"""Makes the virtual environment of a peer, once, and prints the path of its interpreter on the last line.

environments.py appfl|flower FOLDER. torch is pinned first; then comes the peer without its requirements, whose own pins
pull gigabytes; then those of them that the work here needs.
"""

import subprocess
import sys
import venv
from pathlib import Path

TORCH = ("torch==2.13.0", "numpy", "scikit-learn")
PEERS = {"appfl": "appfl==1.12.0", "flower": "flwr==1.42.0"}
NEEDED = {
    "appfl": (
        *(
            "grpcio",
            "grpcio-tools",
            "omegaconf",
            "PyJWT",
            "cryptography",
            "requests",
            "colorama",
            "lz4",
            "zstd",
            "blosc",
        ),
        *("python-xz", "pandas", "matplotlib", "seaborn", "boto3", "wandb", "globus-sdk", "proxystore"),
    ),
    "flower": (
        *("grpcio>=1.70,<2", "grpcio-health-checking>=1.70,<2", "protobuf>=5.28,<7", "cryptography>=50,<51"),
        *("pycryptodome", "iterators>=0.0.2,<0.0.3", "typer>=0.13,<0.21", "tomli", "tomli-w", "pathspec>=1.0.4"),
        *("prompt-toolkit>=3.0.52", "rich>=14,<15", "pyyaml", "requests", "httpx", "click", "packaging<26"),
        *("sqlalchemy[asyncio]>=2.0.45", "alembic", "uvicorn[standard]>=0.49,<0.50", "fastapi>=0.138,<0.139"),
        *("starlette>=1.3.1,<1.4", "certifi", "ray==2.55.1"),
    ),
}
ALONE = {"appfl": ("opacus", "opt_einsum", "globus-compute-sdk"), "flower": ()}
"""Needed as well, without what they require."""


def made(peer: str, folder: Path) -> Path:
    """The interpreter of the peer's environment."""
    place = folder / peer
    python, ready = place / "bin" / "python", place / ".ready"
    if not ready.exists():
        venv.create(place, with_pip=True, clear=True)
        _install(python, *TORCH)
        _install(python, "--no-deps", PEERS[peer], *ALONE[peer])
        _install(python, *NEEDED[peer])
        ready.touch()
    return python


def _install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 (pip)
    if done.returncode:
        raise SystemExit(f"pip could not install {' '.join(what)}: {done.stderr.strip()[-500:]}")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in PEERS:
        raise SystemExit(__doc__)
    print(made(sys.argv[1], Path(sys.argv[2]).resolve()))
