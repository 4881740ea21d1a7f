"""Owns how Flower is met by the tests: what needs it is not collected where it is not installed, and it sends nothing.

`make test-flower` has an environment with it.
"""

import os
import warnings
from importlib import import_module
from importlib.util import find_spec

collect_ignore_glob = [
    "benchmarks/flower_*",
    "benchmarks/peers/*",
]  # scripts for the environments of Flower and other peers
if not find_spec("flwr"):
    collect_ignore_glob += ["tests/flower/*", "src/offbeat/flower/*"]

if find_spec("flwr"):
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it imports warns of what will be gone one day; ours must not
        for name in ("flwr.app", "flwr.clientapp", "flwr.serverapp.strategy", "flwr.simulation"):
            import_module(name)
