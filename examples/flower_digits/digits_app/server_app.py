"""Owns the server: Flower's quickstart with `FedAsync` in place of `FedAvg`."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits_app.task import Net, test
from offbeat.flower import FedAsync

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train for the configured number of epochs, and print the accuracy."""
    config = context.run_config
    strategy = FedAsync(  # this was: FedAvg()
        epochs=int(config["epochs"]),
        alpha=float(config["alpha"]),
        in_flight_max=int(config["in-flight-max"]),
        rho=float(config["rho"]),
        dir=str(config["dir"]) or None,
    )
    torch.manual_seed(0)
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        train_config=ConfigRecord({"lr": float(config["lr"])}),
        evaluate_fn=evaluate,
    )
    last = max(result.evaluate_metrics_serverapp)
    print(f"accuracy {result.evaluate_metrics_serverapp[last]['accuracy']:.3f} at epoch {last}")


def evaluate(_epoch: int, arrays: ArrayRecord) -> MetricRecord:
    """Loss and accuracy on the test images."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test(net)
    return MetricRecord({"loss": loss, "accuracy": accuracy})
