"""The training of a device on Flower's simulation engine; a module of its own, because actors import it."""

import torch
import work
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]
def train(message: Message, context: Context) -> Message:
    """One task on one device."""
    torch.set_num_threads(1)
    module = work.perceptron()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    data = work.digits()[int(context.node_config["partition-id"])]
    work.train(module, data)
    metrics = MetricRecord({"num-examples": len(data[0])})
    content = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
