"""PyTorch's way in: `offbeat.torch.Task`."""

from offbeat.errors import MissingExtra

try:
    from offbeat.train.task import Task, accuracy
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtra("torch", "torch") from error

__all__ = ["Task", "accuracy"]
