"""Owns how commands say metrics: what belongs to one metric is said together."""

from collections.abc import Mapping
from typing import Any

from offbeat.core.rules.average import AVERAGED, of_versions
from offbeat.protocol.worst_served import WORST_TENTH


def metric_words(metrics: Mapping[str, float], form: str = ".4g") -> dict[str, str]:
    """By metric: its value, then that of the averaged model and that of the worst-served devices, where they are known.

    >>> metric_words({"loss": 0.3, "accuracy": 0.95, "accuracy_average": 0.96, "accuracy_worst_tenth": 0.8})
    {'loss': '0.3', 'accuracy': '0.95, averaged model 0.96, worst tenth of devices 0.8'}
    """
    words = {}
    for name in of_versions(metrics):
        if name.endswith(WORST_TENTH) and name.removesuffix(WORST_TENTH) in metrics:
            continue
        said = [f"{float(metrics[name]):{form}}"]
        for ending, of in ((AVERAGED, "averaged model"), (WORST_TENTH, "worst tenth of devices")):
            if name + ending in metrics:
                said.append(f"{of} {float(metrics[name + ending]):{form}}")
        words[name] = ", ".join(said)
    return words


def metric_line(metrics: Mapping[str, float]) -> str:
    """All metrics in a line."""
    return "  ".join(f"{name} {said}" for name, said in metric_words(metrics).items())


def metrics_in(summary: Mapping[str, Any]) -> dict[str, float]:
    """The task's metrics in the summary of a run, simulated or served."""
    from offbeat.sim.result_metrics import RESULTS

    known = {*RESULTS, "rejected", "duplicates", "workers", "metrics_t"}
    return {name: value for name, value in summary.items() if name not in known}
