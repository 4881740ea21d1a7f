"""A node that trains by a formula, as slowly as it is configured."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """x_new from x_tau and the number of the node."""
    partition = int(context.node_config["partition-id"])
    time.sleep(float(context.node_config["delay-s"]))
    x = msg.content["arrays"]["x"].numpy()
    x_new = (x * np.float32(0.75) + np.float32(partition / 7)).astype(np.float32)
    metrics = MetricRecord({"num-examples": 10, "partition": partition})
    return Message(RecordDict({"arrays": ArrayRecord({"x": Array(x_new)}), "metrics": metrics}), reply_to=msg)
