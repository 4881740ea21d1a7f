"""Owns the training on a node: Flower's quickstart, and the mod that adds the proximal term."""

import time

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data
from digits_app.task import train as train_net
from offbeat.flower import proximal_mod

torch.set_num_threads(1)
app = ClientApp(mods=[proximal_mod])


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on the node's data."""
    net = Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    loader = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss = train_net(net, loader, lr=float(msg.content["config"]["lr"]))
    time.sleep(float(context.node_config.get("delay-s", 0.0)))  # plays a slow node when several run on one machine
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})  # type: ignore[arg-type]
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)
