"""The ServerApp of the comparison on Flower: either strategy on the same model, with the same evaluation.

benchmarks/flower_digits.py copies it over the server_app.py in a copy of examples/flower_digits.
"""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from digits_app.task import Net, test
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from offbeat.flower import FedAsync

MANY = 1_000_000
app = ServerApp()


class OverError(Exception):
    """The time is over."""


@app.main()  # type: ignore[untyped-decorator]
def main(grid: Grid, context: Context) -> None:
    """Wait for the fleet, run one strategy for `until-s`, and write (seconds, epoch or round, accuracy) to a file."""
    config = context.run_config
    nodes, until_s, begun = int(config["nodes"]), float(config["until-s"]), [0.0]
    curve: list[tuple[float, int, float]] = []

    def evaluate(t: int, arrays: ArrayRecord) -> MetricRecord:
        net = Net()
        net.load_state_dict(arrays.to_torch_state_dict())
        loss, accuracy = test(net)
        curve.append((time.monotonic() - begun[0], t, accuracy))
        if curve[-1][0] > until_s:
            raise OverError
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    while len(list(grid.get_node_ids())) < nodes:
        time.sleep(0.5)
    torch.manual_seed(0)
    common: dict[str, Any] = {"grid": grid, "initial_arrays": ArrayRecord(Net().state_dict()), "evaluate_fn": evaluate}
    common |= {"train_config": ConfigRecord({"lr": float(config["lr"])})}
    fedavg = config["strategy"] == "fedavg"
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=nodes) if fedavg else FedAsync(evaluate_every=1)
    begun[0] = time.monotonic()
    with suppress(OverError):
        strategy.start(num_rounds=MANY, **common)
    out = Path(str(config["out"]))
    aside = out.with_suffix(".aside")
    aside.write_text(json.dumps(curve))
    aside.replace(out)
