"""Owns the settings of a run: one frozen dataclass = TOML file = command-line flags = environment variables = API.

Rules kept here:
- The same names everywhere: `in_flight_max`, `--in-flight-max`, `OFFBEAT_IN_FLIGHT_MAX`.
- Every setting has a default that works and a line of help. Unknown names and wrong types are refused here; wrong
  values when the run is built, by the piece that they belong to.
"""

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, get_args, get_type_hints

from offbeat.errors import InvalidValue

EPOCHS = 500
IN_FLIGHT_MAX = 32
EVALUATIONS = 100


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that can be set about a run."""

    rule: str = _setting("fedasync", "Mixing rule: fedasync, delta, fedbuff:K, fedavg:K or sgd.")
    alpha: float = _setting(0.6, "Mixing hyperparameter, in (0, 1].")
    alpha_schedule: str = _setting("constant", "constant, or step:T,F: alpha times F from epoch T on.")
    staleness_fn: str = _setting("polynomial:0.5", "constant, polynomial:A, hinge:A,B or exponential:A.")
    staleness_policy: str = _setting("weigh", "weigh (the paper), reject or pace; the last two need staleness-max.")
    staleness_max: int | None = _setting(None, "The largest staleness that reject and pace accept.")
    pace_wait_s: float = _setting(60.0, "Under pace, a task that holds others back for longer is revoked.")
    norm_max: float | None = _setting(None, "The largest ||x_new - x_tau|| that is taken as it is. [default: any]")
    norm_median_max: float | None = _setting(
        None, "Likewise, as a multiple of the running median, after 50 updates. [default: any]"
    )
    norm_policy: str = _setting("refuse", "What is done with a larger step: refuse, or clip.")
    bad_updates_max: int | None = _setting(
        None, "A worker with so many bad updates in a row is quarantined. [default: 5; simulated: never]"
    )
    scheduler: str = _setting("random", "Whom to trigger: random (the paper) or fair (least contribution first).")
    trigger_every_s: float = _setting(0.0, "Trigger workers at this interval; 0 is as soon as there is room.")
    over_selection: float = _setting(1.0, "fedavg: tasks started per group, as a multiple of K.")
    group_deadline_s: float | None = _setting(None, "fedavg: go on with what has arrived by then.")
    in_flight_max: int | None = _setting(None, f"Tasks in flight at a time. [default: min({IN_FLIGHT_MAX}, devices)]")
    tasks_per_device: int = _setting(1, "Tasks that one device may have in flight.")
    devices: int | None = _setting(None, "How many devices. [default: what the task has, else 100]")
    device_model: str = _setting(
        "lognormal:0.5", "constant, lognormal:S, exponential, uniform:LO,HI, pareto:A, trace:FILE or sampled:K."
    )
    down_mbps: float | str | None = _setting(
        None, "Download of each device, Mbit/s: a number, or drawn: uniform:LO,HI, 10*lognormal:S. [default: no limit]"
    )
    up_mbps: float | str | None = _setting(None, "Upload of each device, likewise. [default: no limit]")
    availability: float | str | None = _setting(
        None, "Share of the time that each device is there, a number or drawn. [default: always; a trace has its own]"
    )
    availability_period_s: float = _setting(86_400.0, "How often a device is there for that share.")
    dropout: float | str = _setting(0.0, "Chance that a task is lost on its device, a number or drawn: uniform:0,0.3.")
    mix_s: float = _setting(0.0, "Seconds that the server takes to mix one update.")
    lease_s: float = _setting(3600.0, "A task without a sign of life for this long is released.")
    queue_max: int = _setting(64, "Updates that may wait to be mixed; more are told to come back.")
    retry_after_s: float = _setting(1.0, "When a worker that met a full queue comes back.")
    answers_kept: int = _setting(100_000, "Answers that a push that comes again can get again.")
    released_kept: int = _setting(100_000, "Released tasks whose late push is still judged.")
    epochs: int | None = _setting(None, f"End after this many versions. [default: {EPOCHS}, if nothing else ends it]")
    gradients: int | None = _setting(None, "End after this many gradients were applied.")
    until_s: float | None = _setting(None, "End at this moment of the run's clock.")
    target: str | None = _setting(None, "End when a metric is reached, such as accuracy>=0.95.")
    evaluate_every: int | None = _setting(
        None, f"Versions between evaluations. [default: about {EVALUATIONS} in all; 10, fedavg 1, without epochs]"
    )
    gamma: float | None = _setting(None, "Local learning rate. [default: the task's]")
    gamma_schedule: str = _setting(
        "constant",
        "constant; step:T,F: times F from epoch T on; plateau:METRIC,F: times F at an evaluation without a new best.",
    )
    rho: float | None = _setting(None, "Proximal weight. [default: the task's]")
    weight_decay: float | None = _setting(None, "Weight decay of the local solver. [default: the task's]")
    batch_norm: str | None = _setting(
        None, "BatchNorm's statistics: mix, newest, keep_local or recompute. [default: the task's]"
    )
    warm_up: str | None = _setting(
        None, "DEVICES,PASSES,GAMMA: train x_0 on these devices (a number, or all) before it is published, as 0,5,0.01."
    )
    batch_size: int | None = _setting(None, "Samples per local iteration. [default: the task's]")
    local_passes: int | None = _setting(None, "Passes over the device's data per task. [default: the task's]")
    local_iterations: int | None = _setting(None, "Local iterations per task. [default: the task's]")
    local_iterations_min: int | None = _setting(None, "With the next one: slower devices do fewer iterations.")
    local_iterations_max: int | None = _setting(None, "Local iterations of the fastest device.")
    partition: str = _setting("iid", "Built-in tasks: iid, shards:S or dirichlet:A.")
    partition_sizes: str | None = _setting(None, "Built-in tasks: linear:R or lognormal:S. [default: all alike]")
    width: int | None = _setting(None, "cifar10, wikitext2: channels or hidden units. [default: the paper's]")
    vocabulary: int | None = _setting(None, "wikitext2: the most frequent words that are kept. [default: all]")
    test_max: int | None = _setting(None, "cifar10, wikitext2: samples (chunks) that are tested on. [default: all]")
    seed: int = _setting(0, "One seed, one run.")
    executor: str = _setting(
        "auto",
        "How trainings run: auto, inline, compiled, [batched+]processes[:N], batched, ray[:N] or ray[:N]+batched.",
    )
    ray_address: str | None = _setting(
        None, "With ray: HOST:PORT of a cluster, or auto. [default: RAY_ADDRESS, else a Ray of its own]"
    )
    ray_gpus: float | None = _setting(None, "With ray: how much of a GPU each actor has. [default: none]")
    ray_results_max: int | None = _setting(
        None, "With ray: trainings that may be begun and not yet needed. [default: 256]"
    )

    def __post_init__(self) -> None:
        for name, kinds in _kinds().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kinds))
        if self.seed < 0:
            raise InvalidValue(f"seed is {self.seed} but must be a whole number >= 0")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Settings from names and values; unknown names are refused with the nearest known one."""
        known = [setting.name for setting in fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                raise InvalidValue(f"unknown setting {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
        return cls(**values)

    @classmethod
    def names(cls) -> set[str]:
        """All names."""
        return {setting.name for setting in fields(cls)}

    @property
    def on_one_machine(self) -> bool:
        """Does one machine train on everybody's data?"""
        return self.rule == "sgd"

    def as_dict(self) -> dict[str, Any]:
        """Names and values, as they go into a run folder."""
        return asdict(self)


@cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """The types that every setting may have."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Settings).items()}


def _typed(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """The value as the type of its setting; a text that is a number is one where both are allowed."""
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, str) and str in kinds:
        return _number_or_text(value) if float in kinds else value
    yes_or_no = isinstance(value, bool)  # which Python counts among the whole numbers
    if isinstance(value, Integral) and int in kinds and not yes_or_no:
        return int(value)
    if isinstance(value, Real) and float in kinds and not yes_or_no and not isnan(value):
        return float(value)
    words = {str: "text", int: "a whole number", float: "a number"}
    allowed = " or ".join(words[kind] for kind in kinds if kind in words)
    raise InvalidValue(f"{name} is {value!r} but must be {allowed}")


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file, or a one-line error."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not TOML: {error}") from None
