"""Tiny seeded simulations, one for every rule, policy, world and executor, and the digests that they end with.

    PYTHONPATH=CHECKOUT/src python tests/golden/hashes.py

writes those of the version in CHECKOUT to `hashes.json`, beside this file; those of 0.1 came from commit a6a9a6e. Rules
kept here:
- The task of rules, policies and worlds is `line.py`, whose bits are the same on every machine.
- The bits of torch are those of one kind of processor and one set of libraries: they are recorded with their names.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import offbeat

HERE = Path(__file__).resolve().parent
LINE, RECORDED = HERE / "line.py", HERE / "hashes.json"
CPU, LIBRARIES = Path("/proc/cpuinfo"), ("numba", "numpy", "scikit-learn", "torch")
STALENESS = ("constant", "polynomial:0.5", "polynomial:2", "hinge:1,1", "hinge:0.5,2", "exponential:0.3")
RULES = ("fedasync", "delta", "delta:0.2", "fedbuff:3", "fedbuff:2,0.5", "fedavg:3", "sgd")
POLICIES: dict[str, dict[str, Any]] = {
    "weigh": {},
    "reject": {"staleness_policy": "reject", "staleness_max": 2},
    "pace": {"staleness_policy": "pace", "staleness_max": 2, "pace_wait_s": 2.0},
    "refuse": {"norm_max": 0.45},
    "clip": {"norm_max": 0.3, "norm_policy": "clip"},
    "median": {"norm_median_max": 1.1, "norm_policy": "clip", "epochs": 90},
}
WORLDS: dict[str, dict[str, Any]] = {
    "alpha in steps": {"alpha_schedule": "step:8,0.5"},
    "fair": {"scheduler": "fair", "in_flight_max": 2},
    "triggered together": {"trigger_every_s": 1.5},
    "over selection": {"rule": "fedavg:3", "over_selection": 1.5},
    "group deadline": {"rule": "fedavg:4", "group_deadline_s": 1.0},
    "two tasks per device": {"tasks_per_device": 2},
    "lost and away": {"dropout": 0.2, "availability": 0.5, "availability_period_s": 20.0, "lease_s": 5.0},
    "links": {"down_mbps": "uniform:0.001,0.01", "up_mbps": 0.001},
    "slow mixing": {"mix_s": 0.4, "queue_max": 2},
    "fewer iterations": {"local_iterations_min": 1, "local_iterations_max": 9},
    "sampled": {"device_model": "sampled:4"},
    "pareto": {"device_model": "pareto:1.2"},
    "exponential": {"device_model": "exponential:2"},
    "uniform": {"device_model": "2*uniform:0.5,1.5"},
}
OF_SEVERAL_VECTORS: dict[str, dict[str, Any]] = {
    "fedbuff:3 + momentum:0.9": {},
    "fedbuff:2 + momentum:0.5 + adam:0.05": {},
    "delta + momentum:0.9": {"alpha": 0.3},
    "delta + amsgrad:0.05": {"alpha": 0.3},
    "ca2fl:3": {},
    "ca2fl:3,1,4": {},
    "ace:0.2": {},
    "nesterov:3": {},
    "fadas:2,0.01": {},
    "dcasgd:0.5": {"alpha": 0.5},
    "asyncfeded": {},
    "asyncfeded:0.5,2 + momentum:0.5": {},
    "ringmaster:2": {"alpha": 0.5},
    "rennala:2": {},
    "fedavg:3 + adam:0.05": {},
    "fedavg:3 + momentum:0.9": {"group_deadline_s": 1.0},
    "delta": {"weights": "participation", "alpha": 0.3},
    "fedbuff:2": {"weights": "participation:2 + delay-adaptive:2"},
    "fedasync": {"average": "poly:8"},
    "ca2fl:2": {"average": "ema:0.1"},
}
"""Rules with slots, caches, inner products, weights, finishes or an averaged model, and what goes with them."""
WORLDS |= {
    "shuffled": {"scheduler": "shuffled", "in_flight_max": 4},
    "shuffled groups": {"scheduler": "shuffled", "rule": "fedavg:4"},
}
EXECUTORS = ("inline", "processes:2", "compiled", "batched", "batched+processes:2")
ON_RAY = ("ray:2", "ray:2+batched")


def of_line(**settings: Any) -> str:
    """What a run of the plain task ends with."""
    usual = {"epochs": 24, "seed": 1, "executor": "inline", "device_model": "lognormal:1"}
    return digest(LINE, usual | settings)


def of_digits(executor: str) -> str:
    """What a run of the built-in task ends with, trained by this executor."""
    return digest("digits", {"epochs": 12, "devices": 8, "seed": 1, "local_iterations": 3, "executor": executor})


def digest(task: Path | str, settings: Mapping[str, Any]) -> str:
    run = offbeat.simulate(task, **settings)
    if run.summary["executor"] != settings["executor"]:
        raise AssertionError(f"asked for {settings['executor']}, trained by {run.summary['executor']}")
    average = getattr(run, "average", None)
    mean = "" if average is None else f" {hashlib.sha256(average.vector.tobytes()).hexdigest()}"
    return f"{run.summary['x_sha256']}{mean}"


def cases() -> dict[str, dict[str, Any]]:
    """All that is run with the plain task, by name."""
    staleness = {f"fedasync {s}": {"staleness_fn": s} for s in STALENESS}
    rules = {f"{rule} {name}": {"rule": rule} | policy for rule in RULES for name, policy in POLICIES.items()}
    several = {f"{rule} with its vectors": {"rule": rule} | more for rule, more in OF_SEVERAL_VECTORS.items()}
    slow = {f"{name}, slow mixing": case | {"mix_s": 0.3} for name, case in several.items()}
    return staleness | rules | WORLDS | several | slow


def machine() -> dict[str, Any]:
    """What the bits of torch and of compiled loops may depend on."""
    lines = CPU.read_text().partition("\n\n")[0].splitlines() if CPU.exists() else []
    facts = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    cpu: dict[str, Any] = {name: facts.get(name, "unknown") for name in ("model name", "cpu family", "model")}
    cpu |= {"avx512": "avx512f" in facts.get("flags", "").split()}  # a host may hide it
    return cpu | {"cores": os.cpu_count()} | {name: version(name) for name in LIBRARIES}


def main() -> None:
    found = {"line": {name: of_line(**settings) for name, settings in cases().items()}}
    digits = {executor: of_digits(executor) for executor in (*EXECUTORS, *ON_RAY)}
    RECORDED.write_text(json.dumps(found | {"machine": machine(), "digits": digits}, indent=1) + "\n")


if __name__ == "__main__":
    main()
