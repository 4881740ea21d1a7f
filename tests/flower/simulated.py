"""The digits example on Flower's simulation engine, in a process of its own: python -m tests.flower.simulated DIR."""

import os
import shutil
import sys
import tempfile
import tomllib
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower_digits"
NODES = 4


def main(folder: str) -> None:
    """Run it as its pyproject.toml says, shorter, and keep it in a folder."""
    client_app, server_app = (import_module(f"digits_app.{name}_app") for name in ("client", "server"))

    config: dict[str, Any] = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    app = ServerApp()

    @app.main()
    def _main(grid: Grid, context: Context) -> None:
        context.run_config = config | {"epochs": 40, "dir": folder}
        server_app.main(grid, context)

    own: dict[str, Any] = {
        "num_cpus": 2,
        "address": "local",
        "_temp_dir": tempfile.mkdtemp(prefix="ray-"),
    }  # whatever else runs here
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": own}
    try:
        run_simulation(server_app=app, client_app=client_app.app, num_supernodes=NODES, backend_config=backend)
    except RuntimeError:
        traceback.print_exc()
        sys.stderr.flush()
        shutil.rmtree(own["_temp_dir"], ignore_errors=True)
        os._exit(1)  # the ServerApp's thread would wait for nodes for ever
    shutil.rmtree(own["_temp_dir"], ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
