"""Tasks per second of Flower's simulation engine: its own FedAvg, or FedAsync written by hand on its messages.

flower_sim.py async|fedavg TASKS. Flower has no virtual clock: with `async`, 40 tasks are in flight, and every update
that comes back is mixed and replaced by another task. Both use all cores, one actor of Ray's on each. The first tasks,
as many as there are devices, are not counted: actors start meanwhile.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from typing import Any

import work
from flower_device import app
from flwr.app import ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

IN_FLIGHT = 40
"""Faster than all 100, which did fewer tasks a second."""
ALPHA = 0.2
LOOK_S, NODES_S = 0.01, 120.0


def fedasync(grid: Grid, tasks: int) -> float:
    """Mix every update that comes back and send the result out; returns the seconds for these tasks."""
    x = work.perceptron().state_dict()
    waiting = set(grid.push_messages([_task(node, x) for node in _nodes(grid)[:IN_FLIGHT]]))
    done, begun = -work.DEVICES, 0.0
    while done < tasks:
        replies = [*grid.pull_messages(waiting)]
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            x_new = _checked(reply).content["arrays"].to_torch_state_dict()
            x = {name: (1 - ALPHA) * x[name] + ALPHA * x_new[name] for name in x}
            done += 1
            begun = begun if done else time.perf_counter()
        waiting |= set(grid.push_messages([_task(reply.metadata.src_node_id, x) for reply in replies]))
        if not replies:
            time.sleep(LOOK_S)
    return (time.perf_counter() - begun) * tasks / done


class Whole(FedAvg):  # type: ignore[misc]
    """Flower's FedAvg, which leaves out failed tasks silently; here every task of a group must come back."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = [*map(_checked, replies)]
        if len(replies) < work.DEVICES:
            raise RuntimeError(f"{len(replies)} of {work.DEVICES} tasks came back")
        return super().aggregate_train(server_round, replies)


def fedavg(grid: Grid, tasks: int) -> float:
    """Groups of all devices; returns the seconds for these tasks."""
    _nodes(grid)
    strategy = Whole(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=work.DEVICES)
    x = ArrayRecord(work.perceptron().state_dict())
    strategy.start(grid, x, num_rounds=1)
    begun = time.perf_counter()
    strategy.start(grid, x, num_rounds=tasks // work.DEVICES)
    return time.perf_counter() - begun


def _checked(reply: Message) -> Message:
    if reply.has_error():
        raise RuntimeError(f"a task failed: {reply.error.reason.strip().splitlines()[-1]}")
    return reply


def _nodes(grid: Grid) -> list[int]:
    """The ids of all nodes; the engine starts the server first, and they join while it waits."""
    until = time.monotonic() + NODES_S
    while len(nodes := [*grid.get_node_ids()]) < work.DEVICES:
        if time.monotonic() > until:
            raise TimeoutError(f"{len(nodes)} of {work.DEVICES} nodes came in {NODES_S:g} s")
        time.sleep(LOOK_S)
    return nodes


def _task(node: int, x: dict[str, Any]) -> Message:
    return Message(RecordDict({"arrays": ArrayRecord(x)}), dst_node_id=node, message_type=MessageType.TRAIN)


WAYS = {"async": fedasync, "fedavg": fedavg}


def main(how: str, tasks: int) -> None:
    """Run, and print the tasks per second."""
    server, found = ServerApp(), dict[str, float]()

    @server.main()
    def run(grid: Grid, _context: Context) -> None:
        found["tasks_per_s"] = tasks / WAYS[how](grid, tasks)

    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # a Ray of its own, apart from others on the machine
        here = {"address": "local", "_node_ip_address": "127.0.0.1", "_temp_dir": folder, "include_dashboard": False}
        backend = {"init_args": {"num_cpus": cores, **here}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        try:
            run_simulation(server, app, num_supernodes=work.DEVICES, backend_config=backend)
        except Exception as error:  # after any error the server's thread may wait for ever
            cause = error.__cause__ or error
            print(f"{type(cause).__name__}: {cause}", file=sys.stderr, flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(1)
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in WAYS:
        raise SystemExit(__doc__)
    main(sys.argv[1], int(sys.argv[2]))
