"""Updates per second of Flower's SuperLink and eight SuperNodes that train nothing, without TLS.

flower_net.py PYTHON MB SECONDS FOLDER starts all from the environment of that interpreter, and prints the figures.
"""

import os
import shutil
import sys
from pathlib import Path

from spawned import HOST, Cast, free_ports, lines, listens, tell, watched

WORKERS = 8
PROJECT = """
[project]
name = "untrained"
version = "1.0.0"
license = "MIT"
dependencies = []

[tool.flwr.app]
publisher = "bench"

[tool.flwr.app.components]
serverapp = "untrained.app:server"
clientapp = "untrained.app:app"

[tool.flwr.app.config]
"""
CONNECTION = """
[superlink]
default = "bench"

[superlink.bench]
address = "{address}"
insecure = true
"""


def main(python: Path, mb: str, seconds: float, folder: Path) -> None:
    """Start all processes, and count updates."""
    ports = free_ports(WORKERS + 1)
    address, notes = f"{HOST}:{ports[0]}", folder / "notes"
    _write_project(folder, address)
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    failed = folder / "failed"
    around = {"BENCH_MB": mb, "BENCH_NOTES": str(notes), "BENCH_FAILED": str(failed)}
    around |= {"FLWR_HOME": str(folder / "home"), "PATH": path}
    with Cast(folder) as cast:

        def start(name: str, program: str, *arguments: str) -> int:
            return cast.start(name, [str(python.parent / program), *arguments], around)

        plain = ("--insecure", "--host", HOST, "--port")
        server = start(
            "superlink", "flower-superlink", *plain, str(ports[0]), "--disable-runtime-dependency-installation"
        )
        cast.wait(lambda: listens(ports[0]), "the SuperLink's start")
        for number, port in enumerate(ports[1:]):
            start(f"supernode-{number}", "flower-supernode", *plain, str(port), "--superlink", address)
        start("run", "flwr", "run", str(folder / "project"), "bench")
        cast.wait(lambda: failed.exists() or lines([notes]) >= WORKERS, "an update of every worker")
        found = watched(cast, server, lambda: lines([notes]), seconds)
    if failed.exists():
        raise SystemExit(f"a task failed: {failed.read_text().strip().splitlines()[-1]}")
    tell(found)


def _write_project(folder: Path, address: str) -> None:
    package = folder / "project" / "untrained"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(Path(__file__).with_name("flower_app.py"), package / "app.py")
    (folder / "project" / "pyproject.toml").write_text(PROJECT)
    (folder / "home").mkdir()
    (folder / "home" / "config.toml").write_text(CONNECTION.format(address=address))


if __name__ == "__main__":
    if len(sys.argv) != 5:
        raise SystemExit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), Path(sys.argv[4]))
