"""Owns the spread of rules that the heavy tests go through: every family, kind of vector, weight and finish."""

from typing import Any

RULE_CASES: dict[str, dict[str, Any]] = {
    "fedbuff with momentum": {"rule": "fedbuff:3 + momentum:0.9"},
    "ca2fl": {"rule": "ca2fl:3"},
    "ca2fl in groups of devices": {"rule": "ca2fl:3,1,4"},
    "ace": {"rule": "ace:0.2"},
    "nesterov": {"rule": "nesterov:3"},
    "fadas": {"rule": "fadas:2,0.01"},
    "dcasgd": {"rule": "dcasgd:0.01", "alpha": 0.5},
    "asyncfeded": {"rule": "asyncfeded"},
    "asyncfeded with momentum": {"rule": "asyncfeded:0.5,1 + momentum:0.5"},
    "ringmaster": {"rule": "ringmaster:4", "alpha": 0.5},
    "rennala": {"rule": "rennala:2"},
    "fedadam with a deadline": {"rule": "fedavg:3 + adam:0.05", "group_deadline_s": 1.0},
    "participation": {"rule": "delta", "alpha": 0.3, "weights": "participation"},
    "participation with caches": {"rule": "ace:0.2", "weights": "participation + delay-adaptive:4"},
    "averaged": {"rule": "fedasync", "average": "poly:8"},
    "averaged with slots": {"rule": "nesterov:3", "average": "ema:0.1"},
    "shuffled": {"rule": "fedasync", "scheduler": "shuffled", "in_flight_max": 4},
}
"""Settings by a name; what they do not say is as usual."""
