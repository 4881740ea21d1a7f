"""Owns `FedAsync`, which a ServerApp uses in place of one of Flower's own strategies, and its result.

Rules kept here:
- Settings have the names, the defaults and the meaning that they have everywhere in Offbeat.
- `start` has the arguments and the result of Flower's strategies.
"""

import hashlib
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result as FlowerResult

from offbeat import method
from offbeat.core.layout import Model
from offbeat.core.rules import Rule, average_from_spec, with_average
from offbeat.errors import InvalidValue
from offbeat.flower.fleet_loop import FleetLoop, Nodes
from offbeat.flower.flower_run import FlowerRun, PollingClock
from offbeat.flower.grid_messages import Arrays, GridMessages, RecordKeys
from offbeat.protocol.messages import WorkerJoined
from offbeat.settings import Settings
from offbeat.storage.fold import RunFold
from offbeat.storage.json_file import plain
from offbeat.storage.rows import as_event
from offbeat.storage.run_folder import RunFolder

KNOWN = (
    *("average", "alpha", "alpha_schedule", "staleness_fn", "staleness_policy", "staleness_max", "pace_wait_s"),
    *("norm_max", "norm_median_max", "norm_policy", "bad_updates_max"),
    *("scheduler", "trigger_every_s", "over_selection", "group_deadline_s", "in_flight_max", "lease_s"),
    *("epochs", "until_s", "target", "evaluate_every", "rho", "seed"),
)
"""Settings of a run on Flower; the others belong to a task, or to the simulator."""
OF_THE_RULE = ("alpha", "alpha_schedule", "staleness_fn")
"""Settings of a rule that is given by its name; a `Rule` object has its own."""
NODES_MAX = 1_000_000
"""No limit of its own: Flower decides how many nodes there are."""
BAD_UPDATES_MAX = 5
RELEASED_KEPT = 10_000
"""Released tasks whose late reply is still decided on: every checkpoint holds them, and a node has at most one."""
TTL_LEASES = 2.0
"""Time to live of a message, in leases: a reply may come late, after the end of its lease."""

EvaluateFn = Callable[[int, ArrayRecord], MetricRecord | None]

log = logging.getLogger("flwr.offbeat")


class Applied(NamedTuple):
    t: int
    """The epoch that it went into."""
    node: int
    tau: int
    staleness: int
    alpha_t: float
    """The weight of its x_new."""
    at: float
    """Seconds on the run's own clock."""


@dataclass(repr=False)
class Result(FlowerResult):  # type: ignore[misc]  # user code may ask for its type; Flower is not there to be checked
    """Flower's result, its dictionaries keyed by epoch t instead of round."""

    history: list[Applied] = field(default_factory=list)
    """Every mixed update in order, including those before a resume."""
    summary: Mapping[str, Any] = field(default_factory=dict)


class FedAsync:
    """Asynchronous federated optimization on Flower's Grid: every reply is mixed as it comes."""

    def __init__(
        self,
        rule: str | Rule = "fedasync",
        *,
        dir: str | Path | None = None,  # noqa: A002 (what it is called everywhere)
        checkpoint_every: int = 1,
        message_ttl_s: float | None = None,
        poll_s: float = 0.2,
        nodes_every_s: float = 1.0,
        threads: int = 1,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        **settings: Any,
    ) -> None:
        """`rule` is a rule or its name; `settings` are alpha, staleness_fn, in_flight_max, epochs and the like.

        The run is kept in `dir`: started again it continues, and `offbeat status` and the other commands read it.
        """
        self.settings = _settings_of(rule, settings)
        self.rule = method.rule_of(self.settings) if isinstance(rule, str) else rule
        self._by_name, self._named = isinstance(rule, str), rule if isinstance(rule, str) else rule.spec
        self.dir = None if dir is None else Path(dir)
        self.keys = RecordKeys(arrayrecord_key, configrecord_key, weighted_by_key)
        self.checkpoint_every, self.message_ttl_s, self.threads = checkpoint_every, message_ttl_s, threads
        self.poll_s, self.nodes_every_s = poll_s, nodes_every_s
        self.clock_from: Callable[[float], PollingClock] = PollingClock
        for name in ("checkpoint_every", "message_ttl_s", "poll_s", "nodes_every_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise InvalidValue(f"{name} is {value!r} but must be > 0")
        self._method(self.settings)  # refuses a setting that is out of range now, not when the fleet is waiting

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: EvaluateFn | None = None,
    ) -> Result:
        """Train to the end that the settings say; arguments and result are those of Flower's own strategies.

        `num_rounds` is the number of epochs and `timeout` the lease, where the settings give none.
        """
        settings = self._filled(num_rounds, timeout)
        if settings.target is not None and evaluate_fn is None:
            raise InvalidValue(f"target is {settings.target!r}, which only evaluate_fn can measure; give evaluate_fn")
        if evaluate_config:
            log.warning("evaluate_config is not used: nodes get no evaluate messages; to evaluate, give evaluate_fn")
        arrays = Arrays(initial_arrays)
        if arrays.rounded:
            log.warning("%s: mixed in float32, sent out in their own dtype", ", ".join(arrays.rounded))
        config = ConfigRecord({**(train_config or {}), **({"rho": settings.rho} if settings.rho is not None else {})})
        with ExitStack() as last:
            folder = last.enter_context(self._folder(settings, arrays, last))
            run = FlowerRun(
                *(folder, self._method(settings), arrays.model(initial_arrays), self.clock_from),
                checkpoint_every=self.checkpoint_every,
                threads=self.threads,
            )
            last.callback(run.updater.close)
            messages = GridMessages(
                grid, arrays, config, self.keys, ttl_s=self.message_ttl_s or TTL_LEASES * settings.lease_s
            )
            return self._run(run, messages, evaluate_fn)

    def _run(self, run: FlowerRun, messages: GridMessages, evaluate_fn: EvaluateFn | None) -> Result:
        joined = [event for row in run.ledger.rows("joined") if isinstance(event := as_event(row), WorkerJoined)]
        measured = {e.t: MetricRecord(dict(e.metrics)) for e in run.coordinator.evaluations}
        nodes = Nodes(joined)

        def evaluate(t: int, x: Model, mean: Model | None) -> Mapping[str, float] | None:
            metrics = evaluate_fn(t, messages.arrays.record(x)) if evaluate_fn else None
            if metrics is None:
                return None
            measured[t], numbers = metrics, _numbers(metrics)
            of_mean = evaluate_fn(t, messages.arrays.record(mean)) if evaluate_fn and mean is not None else None
            if of_mean is None:
                return numbers
            both = with_average(numbers, _numbers(of_mean))
            measured[t] = MetricRecord({**metrics, **both})
            return both

        fleet = FleetLoop(run, messages, nodes, evaluate, poll_s=self.poll_s, nodes_every_s=self.nodes_every_s)
        fleet.run_to_end()
        run.checkpoint()
        summary = self._summary(run)
        history = [
            Applied(d.t, nodes.node(d.lease.worker), d.lease.tau, d.staleness, d.mix.new, d.at)
            for d in run.ledger.decisions()
            if d.mix is not None
        ]
        run.finish(summary)
        return Result(messages.arrays.record(run.x), fleet.metrics.by_epoch, {}, measured, history, summary)

    # --- settings ----------------------------------------------------------------------------------------------------

    def _filled(self, num_rounds: int | None, timeout: float | None) -> Settings:
        ends = (self.settings.epochs, self.settings.until_s, self.settings.target)
        filled = self.settings
        if num_rounds is not None and all(end is None for end in ends):
            filled = replace(filled, epochs=num_rounds)
        if timeout is not None and filled.lease_s == Settings().lease_s:
            filled = replace(filled, lease_s=float(timeout))
        if not isfinite(filled.lease_s):
            raise InvalidValue("lease_s is infinite: a node that dies would keep its task for ever; give it in seconds")
        return filled

    def _method(self, settings: Settings) -> method.Method:
        plan = method.plan_of(settings, self.rule, NODES_MAX)
        plan = replace(plan, bad_updates_max=plan.bad_updates_max or BAD_UPDATES_MAX, released_kept=RELEASED_KEPT)
        scheduler = method.scheduler_of(None, settings, self.rule, NODES_MAX)
        average = average_from_spec(settings.average or "none")
        return method.Method(self.rule, plan, scheduler, settings.seed, average=average)

    def _folder(self, settings: Settings, arrays: Arrays, last: ExitStack) -> RunFolder:
        known = [name for name in KNOWN if self._by_name or name not in OF_THE_RULE]
        recorded = {name: value for name, value in settings.as_dict().items() if name in known}
        recorded |= {"layout": arrays.layout.fingerprint}
        path = self.dir or Path(last.enter_context(tempfile.TemporaryDirectory(prefix="offbeat-"))) / "run"
        return RunFolder.begin(path, {"task": "flower", "served": True, "rule": self._named, **recorded})

    def _summary(self, run: FlowerRun) -> dict[str, Any]:
        c = run.coordinator
        fold = RunFold.of(run.ledger)
        results: dict[str, Any] = {"t": c.t, "epochs": c.plan.epochs, "applied": c.applied, "gradients": c.gradients}
        results |= {
            "rejected": c.judge.decisions - c.applied,
            "duplicates": c.judge.duplicates,
            "wall_s": round(c.at, 3),
        }
        results |= {"staleness_mean": fold.staleness_mean, "staleness_largest": fold.staleness_largest}
        results |= dict(c.evaluations[-1].metrics) if c.evaluations else {}
        results |= {"x_sha256": hashlib.sha256(run.x.vector.data).hexdigest(), "ended": c.end_reason}
        results |= {"failed": c.outcome.failed} | ({} if run.vectors.mean is None else {"average_t": c.t})
        results |= {"dir": str(self.dir) if self.dir else None, "task": "flower", "settings": run.folder.settings}
        return dict(plain(results, "summary"))


def _numbers(metrics: MetricRecord) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if not isinstance(value, list)}


def _settings_of(rule: str | Rule, settings: dict[str, Any]) -> Settings:
    """The settings of a run; a setting that a run on Flower does not have is refused."""
    for name in settings:
        if name in Settings.names() and name not in KNOWN:
            raise InvalidValue(f"{name} is no setting of FedAsync on Flower; it has {', '.join(KNOWN)}")
        if name in OF_THE_RULE and not isinstance(rule, str):
            raise InvalidValue(f"{name} belongs to a rule that is given by its name; rule {rule.spec} has its own")
    made = Settings.of({**({"rule": rule} if isinstance(rule, str) else {}), **settings})
    if made.on_one_machine:
        raise InvalidValue("rule sgd trains on one machine; simulate it, or use another rule here")
    return made
