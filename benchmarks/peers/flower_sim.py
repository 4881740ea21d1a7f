"""Tasks per second of Flower's simulation engine: its own FedAvg, or FedAsync written by hand on its messages.

flower_sim.py async|fedavg TASKS. Flower has no virtual clock: with `async`, 40 tasks are in flight, and whatever comes
back is mixed and replaced by another. Both use all cores, one actor of Ray's on each.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

IN_FLIGHT = 40
ALPHA = 0.2
app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One task on one device."""
    torch.set_num_threads(1)
    module = work.perceptron()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(module, work.digits()[int(context.node_config["partition-id"])])
    metrics = MetricRecord({"num-examples": 14})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


def fedasync(grid: Grid, tasks: int) -> None:
    """Mix whatever comes back, and send the result out in its place."""
    x = work.perceptron().state_dict()
    nodes = [*grid.get_node_ids()]
    waiting = set(grid.push_messages([_task(node, x) for node in nodes[:IN_FLIGHT]]))
    done = 0
    while done < tasks:
        replies = [*grid.pull_messages([*waiting])]
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            x_new = reply.content["arrays"].to_torch_state_dict()
            x = {name: (1 - ALPHA) * x[name] + ALPHA * x_new[name] for name in x}
            done += 1
        waiting |= set(grid.push_messages(_task(reply.metadata.src_node_id, x) for reply in replies))
        if not replies:
            time.sleep(0.01)


def _task(node: int, x: dict[str, Any]) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord(x)}), dst_node_id=node, message_type=MessageType.TRAIN)


def fedavg(grid: Grid, groups: int) -> None:
    """Groups of all devices."""
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.DEVICES)
    strategy.start(grid, ArrayRecord(work.perceptron().state_dict()), num_rounds=groups)


def main(how: str, tasks: int) -> None:
    """Run and tell; the first tasks, while actors start, do not count."""
    server, found = ServerApp(), dict[str, float]()

    @server.main()
    def run(grid: Grid, _context: Context) -> None:
        steps: Iterable[int] = (work.DEVICES, tasks)
        for count in steps:
            begun = time.perf_counter()
            if how == "async":
                fedasync(grid, count)
            else:
                fedavg(grid, count // work.DEVICES)
            found["tasks_per_s"] = count / (time.perf_counter() - begun)

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a Ray of its own, whatever else runs on the machine
        init = {"num_cpus": cores, "address": "local", "_temp_dir": folder, "include_dashboard": False}
        backend = {"init_args": init, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server, app, num_supernodes=work.DEVICES, backend_config=backend)
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
