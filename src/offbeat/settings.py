"""Owns the settings of a run: one frozen dataclass = TOML file = command-line flags = environment variables = API.

Rules kept here:
- The same names everywhere: `in_flight_max`, `--in-flight-max`, `OFFBEAT_IN_FLIGHT_MAX`.
- Every setting has a default that works and a line of help. Unknown names and wrong types are refused here; wrong
  values when the run is built, by the piece that they belong to.
"""

import difflib
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from functools import cache, partial
from math import isnan
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Self, TypedDict, get_args, get_type_hints

from offbeat.errors import InvalidValue

EPOCHS = 500
IN_FLIGHT_MAX = 32
QUEUE_MAX = 64
EVALUATIONS = 100
DEPRECATED = ("width", "vocabulary", "test_max")
"""Settings of single tasks, from before there was `task_args`."""
Scalar = bool | int | float | str
GROUPS = {
    "method": "Method",
    "fleet": "Fleet",
    "task": "Task and local training",
    "end": "End of the run",
    "evaluation": "Evaluation",
    "server": "Server",
    "execution": "Execution",
}
"""What the settings are about, with the headings that help and docs show them under."""


def _setting(group: str, default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text, "group": group})


_method, _fleet, _task, _end, _evaluation, _server, _execution = (partial(_setting, group) for group in GROUPS)


@dataclass(frozen=True, slots=True)
class Settings:
    rule: str = _method(
        "fedasync",
        "Mixing rule, with finishes behind it: fedasync, delta[:BETA], fedbuff:K[,ETA], 'fedbuff:10 + momentum:0.9', "
        "fedavg:K, sgd, ...; `offbeat rules` lists all of them.",
    )
    weights: str | None = _method(
        None,
        "How much updates count beside their staleness: participation[:CAP], delay-adaptive:FREE, several with + "
        "between them, or none. [default: none]",
    )
    average: str | None = _method(
        None,
        "Keep a mean of the versions beside the newest: poly:P (late ones count more), ema:C or none. [default: none]",
    )
    alpha: float = _method(0.6, "Mixing hyperparameter, in (0, 1].")
    alpha_schedule: str = _method("constant", "constant, or step:T,F: alpha is multiplied by F from epoch T on.")
    staleness_fn: str = _method(
        "polynomial:0.5", "Weight by staleness: constant, polynomial:A, hinge:A,B, exponential:A."
    )
    staleness_policy: str = _method("weigh", "weigh (the paper); reject or pace, which enforce staleness-max.")
    staleness_max: int | None = _method(None, "Largest staleness that reject and pace allow.")
    pace_wait_s: float = _method(60.0, "Under pace, a task that holds others back for longer than this is revoked.")
    norm_max: float | None = _method(None, "Largest ||x_new - x_tau|| that is mixed unchanged. [default: no limit]")
    norm_median_max: float | None = _method(
        None, "The same limit as a multiple of the running median, after 50 updates. [default: no limit]"
    )
    norm_policy: str = _method("refuse", "What happens to an update with a larger step: refuse, or clip.")
    value_max: float | None = _method(
        None, "Largest absolute value that an update may hold; inf is no limit. [default: 1e8]"
    )
    bad_updates_max: int | None = _server(
        None, "Quarantine a worker after this many bad updates in a row. [default: 5; simulated: never]"
    )
    scheduler: str = _method(
        "random",
        "Order of devices: random (the paper), fair (least contribution first), shuffled (each once a round).",
    )
    trigger_every_s: float = _method(0.0, "Seconds between two triggers; 0 triggers as soon as there is room.")
    over_selection: float = _method(1.0, "fedavg: tasks started per group, as a multiple of K.")
    group_deadline_s: float | None = _method(
        None, "fedavg: close a group after this many seconds, with the updates that have arrived. [default: never]"
    )
    in_flight_max: int | None = _fleet(
        None, f"Most tasks in flight at a time. [default: min({IN_FLIGHT_MAX}, devices)]"
    )
    tasks_per_device: int = _fleet(1, "Tasks that one device may have in flight.")
    devices: int | None = _fleet(None, "Number of devices. [default: as many as the task has, else 100]")
    device_model: str = _fleet(
        "lognormal:0.5",
        "How long tasks take: constant, lognormal:S, exponential, uniform:LO,HI, pareto:A, trace:FILE or sampled:K.",
    )
    down_mbps: float | str | None = _fleet(
        None, "Download speed of a device, Mbit/s: a number, uniform:LO,HI, 10*lognormal:S, ... [default: no limit]"
    )
    up_mbps: float | str | None = _fleet(None, "Upload speed of a device, in the same way. [default: no limit]")
    availability: float | str | None = _fleet(
        None, "Share of the time that a device is available: a number, uniform:LO,HI, ... [default: 1, or the trace's]"
    )
    availability_period_s: float = _fleet(
        86_400.0, "Length of the period in which a device is available for that share."
    )
    dropout: float | str = _fleet(0.0, "Chance that a task is lost on its device: a number, uniform:0,0.3, ...")
    device_cache: str | None = _server(
        None, "Where a rule keeps its vectors per device: memory or disk. [default: memory where they fit, else disk]"
    )
    mix_s: float = _server(0.0, "Simulated: seconds that the server takes to mix one update.")
    lease_s: float = _server(3600.0, "Release a task after this many seconds without a sign of life.")
    silent_s: float | None = _server(
        None,
        "Served: give the place of a worker to others after this many seconds without a sign of life. "
        "[default: three heartbeats, 90]",
    )
    queue_max: int = _server(
        QUEUE_MAX,
        "Updates that may wait to be mixed; workers with more are told to come back. Served, the default is at least "
        "in_flight_max.",
    )
    retry_after_s: float = _server(1.0, "Seconds after which a worker that met a full queue comes back.")
    answers_kept: int = _server(100_000, "Answers that are kept for updates that are pushed a second time.")
    released_kept: int = _server(100_000, "Released tasks that are kept, so that a late push is still judged.")
    epochs: int | None = _end(None, f"End after this many versions. [default: {EPOCHS}, if nothing else ends the run]")
    gradients: int | None = _end(None, "End after this many gradients were applied.")
    until_s: float | None = _end(None, "End after this many seconds of the run's clock.")
    target: str | None = _end(None, "End when a metric is reached, such as accuracy>=0.95.")
    evaluate_every: int | None = _evaluation(
        None,
        f"Versions between evaluations. [default: about {EVALUATIONS} evaluations in all; without epochs 10, fedavg 1]",
    )
    keep_best: str | None = _evaluation(
        None,
        "Keep the best version by a metric beside the newest: METRIC, METRIC:max or METRIC:min, such as accuracy. "
        "METRIC alone is the largest; of loss, error and perplexity the smallest. [default: only the newest]",
    )
    gamma: float | None = _task(None, "Local learning rate. [default: the task's]")
    gamma_schedule: str = _task(
        "constant",
        "constant; step:T,F: gamma is multiplied by F from epoch T on; plateau:METRIC,F: at every evaluation without "
        "a new best.",
    )
    rho: float | None = _task(None, "Proximal weight. [default: the task's]")
    weight_decay: float | None = _task(None, "Weight decay of the local solver. [default: the task's]")
    batch_norm: str | None = _task(
        None, "BatchNorm's statistics: mix, newest, keep_local or recompute. [default: the task's]"
    )
    warm_up: str | None = _task(
        None, "DEVICE,PASSES,GAMMA: train x_0 on this device (or all) before it is published, such as 0,5,0.01."
    )
    batch_size: int | None = _task(None, "Samples per local iteration. [default: the task's]")
    local_passes: int | None = _task(None, "Passes over the device's data per task. [default: the task's]")
    local_iterations: int | None = _task(None, "Local iterations per task. [default: the task's]")
    local_iterations_min: int | None = _task(None, "Local iterations of the slowest device; set min and max.")
    local_iterations_max: int | None = _task(None, "Local iterations of the fastest device; set min and max.")
    partition: str = _task("iid", "Built-in tasks: how samples are dealt out to devices: iid, shards:S or dirichlet:A.")
    partition_sizes: str | None = _task(
        None, "Built-in tasks: how many samples a device has: linear:R or lognormal:S. [default: equally many]"
    )
    task_args: Mapping[str, Scalar] | None = _task(
        None, "Argument of the function that makes the task, such as width=16; may be repeated."
    )
    width: int | None = _task(None, "Deprecated: use --task-arg width=N. Channels or hidden units.")
    vocabulary: int | None = _task(None, "Deprecated: use --task-arg vocabulary=N. Most frequent words that are kept.")
    test_max: int | None = _task(None, "Deprecated: use --task-arg test_max=N. Samples that are tested on.")
    seed: int = _execution(0, "The same seed gives the same run.")
    executor: str = _execution(
        "auto",
        "How trainings run: auto, inline, compiled, batched, [batched+]processes[:N], compiled-torch[:N], "
        "channels-last[:N], ray[:N] or ray[:N]+batched.",
    )
    ray_address: str | None = _execution(
        None, "With ray: HOST:PORT of a cluster, or auto. [default: RAY_ADDRESS, else a Ray of its own]"
    )
    ray_gpus: float | None = _execution(None, "With ray: share of a GPU for each actor. [default: none]")
    ray_results_max: int | None = _execution(
        None, "With ray: trainings that may be begun before their results are needed. [default: 256]"
    )

    def __post_init__(self) -> None:
        for name, kinds in _kinds().items():
            object.__setattr__(self, name, _typed(name, getattr(self, name), kinds))
        object.__setattr__(self, "task_args", TaskArgs.of(self.task_args))
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
        return {setting.name for setting in fields(cls)}

    @property
    def on_one_machine(self) -> bool:
        """Does one machine train on everybody's data?"""
        return self.rule.partition("+")[0].strip() == "sgd"

    def as_dict(self) -> dict[str, Any]:
        """Names and values, as they go into a run folder."""
        return asdict(self)


def room_for(in_flight_max: int) -> int:
    """Uploads, and updates in the queue, that a server with so many tasks in flight has room for, if nothing is said.

    All of them may come at the same time.
    """
    return max(QUEUE_MAX, in_flight_max)


class TaskArgs(dict[str, Scalar]):
    """The arguments of the function that makes the task. They are never changed, so they can be part of a key."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    @classmethod
    def of(cls, values: object) -> Self | None:
        """Names and plain values; an empty table is the same as none."""
        if values is not None and not isinstance(values, Mapping):
            raise InvalidValue(f"task_args is {values!r} but must be a table of names and values")
        return cls({name: cls._plain(name, value) for name, value in values.items()}) if values else None

    @staticmethod
    def _plain(name: object, value: object) -> Scalar:
        if isinstance(name, str) and isinstance(value, bool | str):
            return value
        if isinstance(name, str) and isinstance(value, Real) and not isnan(value):
            return int(value) if isinstance(value, Integral) else float(value)
        raise InvalidValue(f"task_args has {name!r} = {value!r} but a value must be a number, true, false or text")


class SettingsDict(TypedDict, total=False):
    """The settings as keyword arguments, for editors and type checkers; the tests compare them with `Settings`.

    Missing are those that `simulate` takes as functions, too: rule, alpha, staleness_fn, gamma.
    """

    alpha_schedule: str
    weights: str | None
    average: str | None
    device_cache: str | None
    staleness_policy: str
    staleness_max: int | None
    pace_wait_s: float
    norm_max: float | None
    norm_median_max: float | None
    norm_policy: str
    value_max: float | None
    bad_updates_max: int | None
    scheduler: str
    trigger_every_s: float
    over_selection: float
    group_deadline_s: float | None
    in_flight_max: int | None
    tasks_per_device: int
    devices: int | None
    device_model: str
    down_mbps: float | str | None
    up_mbps: float | str | None
    availability: float | str | None
    availability_period_s: float
    dropout: float | str
    mix_s: float
    lease_s: float
    silent_s: float | None
    queue_max: int
    retry_after_s: float
    answers_kept: int
    released_kept: int
    epochs: int | None
    gradients: int | None
    until_s: float | None
    target: str | None
    evaluate_every: int | None
    keep_best: str | None
    gamma_schedule: str
    rho: float | None
    weight_decay: float | None
    batch_norm: str | None
    warm_up: str | None
    batch_size: int | None
    local_passes: int | None
    local_iterations: int | None
    local_iterations_min: int | None
    local_iterations_max: int | None
    partition: str
    partition_sizes: str | None
    task_args: Mapping[str, Scalar] | None
    width: int | None
    vocabulary: int | None
    test_max: int | None
    seed: int
    executor: str
    ray_address: str | None
    ray_gpus: float | None
    ray_results_max: int | None


@cache
def _kinds() -> dict[str, tuple[type, ...]]:
    """The types that every setting may have; `task_args` has its own."""
    hints = get_type_hints(Settings)
    return {name: get_args(hint) or (hint,) for name, hint in hints.items() if name != "task_args"}


def _typed(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    """The value as the type of its setting; a text that is a number is one where both are allowed."""
    if value is None and type(None) in kinds:
        return None
    if isinstance(value, str) and str in kinds:
        with suppress(ValueError):
            return float(value) if float in kinds else value
        return value
    yes_or_no = isinstance(value, bool)  # which Python counts among the whole numbers
    if isinstance(value, Integral) and int in kinds and not yes_or_no:
        return int(value)
    if isinstance(value, Real) and float in kinds and not yes_or_no and not isnan(value):
        return float(value)
    words = {str: "text", int: "a whole number", float: "a number"}
    allowed = " or ".join(words[kind] for kind in kinds if kind in words)
    raise InvalidValue(f"{name} is {value!r} but must be {allowed}")


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file, or a one-line error."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InvalidValue(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not TOML: {error}") from None
