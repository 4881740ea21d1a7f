"""A Flower app without training: eight workers send back the model that they get, and the server mixes it at once.

Flower's own strategies wait for a whole group; this is FedAsync written by hand on its messages, as a user would.
"""

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

WORKERS = 8
PARTS = 10
ALPHA = 0.2
LOOK_S = 0.2
app = ClientApp()
server = ServerApp()


@app.train()
def train(message: Message, _context: Context) -> Message:
    """Send the model back."""
    return Message(content=message.content, reply_to=message)


@server.main()
def main(grid: Grid, _context: Context) -> None:
    """Mix until the process is ended; a line in the notes for every update."""
    size = int(os.environ["BENCH_MB"]) * 250_000 // PARTS
    x = {f"part-{number}": np.ones(size, np.float32) for number in range(PARTS)}
    while len(nodes := [*grid.get_node_ids()]) < WORKERS:
        time.sleep(LOOK_S)
    waiting = set(grid.push_messages([_task(node, x) for node in nodes]))
    with Path(os.environ["BENCH_NOTES"]).open("w", buffering=1) as notes:
        while True:
            replies = [*grid.pull_messages([*waiting])]
            for reply in replies:
                waiting.discard(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    Path(os.environ["BENCH_FAILED"]).write_text(reply.error.reason)
                    raise RuntimeError(reply.error.reason)
                arrays = reply.content["arrays"]
                x = {name: (1 - ALPHA) * x[name] + ALPHA * arrays[name].numpy() for name in x}
                notes.write("1\n")
            waiting |= set(grid.push_messages([_task(reply.metadata.src_node_id, x) for reply in replies]))
            if not replies:
                time.sleep(LOOK_S)


def _task(node: int, x: dict[str, Any]) -> Message:
    arrays = ArrayRecord({name: Array(part) for name, part in x.items()})
    return Message(RecordDict({"arrays": arrays}), dst_node_id=node, message_type=MessageType.TRAIN)
