"""A run that ends once a lease was released and enough was mixed; what came out is written beside its folder."""

import json
from pathlib import Path

import numpy as np
from flwr.app import Array, ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from offbeat.flower import FedAsync
from offbeat.storage.ledger import Ledger

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run, and tell."""
    folder, epochs_min = Path(str(context.run_config["dir"])), int(context.run_config["epochs-min"])

    def evaluate(t: int, _arrays: ArrayRecord) -> MetricRecord:
        with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
            return MetricRecord({"done": float(t >= epochs_min and ledger.count("released") > 0)})

    strategy = FedAsync(
        target="done>=1", evaluate_every=1, lease_s=float(context.run_config["lease-s"]), alpha=0.6, dir=folder
    )
    x_0 = ArrayRecord({"x": Array(np.linspace(-1, 1, 5, dtype=np.float32))})
    result = strategy.start(grid=grid, initial_arrays=x_0, evaluate_fn=evaluate)
    partitions = [result.train_metrics_clientapp[applied.t]["partition"] for applied in result.history]
    told = {
        "history": result.history,
        "partitions": partitions,
        "x": result.arrays["x"].numpy().tobytes().hex(),
        "summary": result.summary,
    }
    aside = folder.with_suffix(".aside")
    aside.write_text(json.dumps(told))
    aside.replace(folder.with_suffix(".json"))
