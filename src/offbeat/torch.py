"""PyTorch's way in: `offbeat.torch.Task`."""

from offbeat.errors import MissingExtra

try:
    from offbeat.train.evaluation import accuracy
    from offbeat.train.task import Task, WarmUp
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise MissingExtra("torch", "torch") from error

__all__ = ["Task", "WarmUp", "accuracy"]
