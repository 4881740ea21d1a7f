"""A Grid without a network and without time: nodes that train by a formula, and a clock that moves when one waits."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.task_identity import TaskIdentity

from offbeat.core.rules import Rule
from offbeat.flower import FedAsync, Result

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # who creates messages, says Flower

Named = dict[str, np.ndarray[Any, Any]]
SIZE = 5
X_0 = np.linspace(-1, 1, SIZE, dtype=np.float32)


def pushed(x_tau: np.ndarray[Any, Any], node: int) -> np.ndarray[Any, Any]:
    """What a node makes of the model that it received."""
    made: np.ndarray[Any, Any] = (x_tau * np.float32(0.75) + np.float32(node / 7)).astype(np.float32)
    return made


def reply(message: Message, arrays: Named, samples: Any = 10, **metrics: Any) -> Message:
    """A reply as a quickstart ClientApp sends it."""
    record = ArrayRecord({name: Array(np.asarray(array)) for name, array in arrays.items()})
    said = MetricRecord({"num-examples": samples, **metrics})
    return Message(RecordDict({"arrays": record, "metrics": said}), reply_to=message)


def error(message: Message, code: int, reason: str = "it broke") -> Message:
    """A reply that says that there is none."""
    return Message(Error(code, reason), reply_to=message)


def trained(message: Message, node: int) -> Message:
    """What an honest node answers."""
    arrays = {name: array.numpy() for name, array in message.content["arrays"].items()}
    return reply(message, {"x": pushed(arrays["x"], node), "n": arrays["n"] + 1}, loss=float(node))


@dataclass
class Node:
    """How a node behaves."""

    task_s: float = 1.0
    joins_at: float = 0.0
    leaves_at: float = inf
    """From then on it is not connected, and what it was at is lost."""
    answer: Callable[[Message, int], Message | None] = trained
    """None is never."""
    unseen: tuple[float, float] = (inf, inf)
    """Between these it is at work, but the Grid does not list it."""


@dataclass
class Sent:
    """A message under way."""

    message: Message
    node: int
    at: float
    due: float


class FakeGrid:
    """Flower's Grid, as far as it is used."""

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes
        self.at = 0.0
        self.sent: list[Sent] = []
        self.open: dict[str, Sent] = {}
        self.in_flight: list[int] = []
        """Messages that were open after each push."""
        self.echo = False
        """Is every reply delivered again and again?"""
        self._answered: list[Message] = []

    def get_node_ids(self) -> Iterable[int]:
        there = ((number, node) for number, node in self.nodes.items() if node.joins_at <= self.at < node.leaves_at)
        return [number for number, node in there if not node.unseen[0] <= self.at < node.unseen[1]]

    def push_messages(self, messages: Sequence[Message]) -> list[str]:
        names = []
        for message in messages:
            name, number = f"message-{len(self.sent)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = name
            sent = Sent(message, number, self.at, self.at + self.nodes[number].task_s)
            self.sent.append(sent)
            self.open[name] = sent
            names.append(name)
        self.in_flight.append(len(self.open))
        return names

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        asked = sorted((sent.due, name, sent) for name in names if (sent := self.open.get(name)))
        replies = list(self._answered) if self.echo else []
        for _, name, sent in asked:
            answer = self._answer(sent)
            if answer is not None:
                del self.open[name]
                replies.append(answer)
                self._answered.append(answer)
        return replies

    def _answer(self, sent: Sent) -> Message | None:
        node = self.nodes[sent.node]
        if sent.due <= self.at and sent.due < node.leaves_at:
            answer = node.answer(sent.message, sent.node)
            if answer is not None:
                return answer
        if self.at >= node.leaves_at:
            return error(sent.message, ErrorCode.NODE_UNAVAILABLE)
        if self.at > sent.at + sent.message.metadata.ttl:
            return error(sent.message, ErrorCode.MESSAGE_UNAVAILABLE)
        return None


class FakeClock:
    """The clock of a FakeGrid, from where the run stood; to wait is to let its time pass."""

    def __init__(self, grid: FakeGrid, begun_at: float) -> None:
        self.grid, self.offset = grid, begun_at - grid.at

    def now(self) -> float:
        return self.grid.at + self.offset

    def wait(self, seconds: float) -> None:
        self.grid.at += max(seconds, 1e-3)
        if self.grid.at > 1e5:
            raise AssertionError("the run does not end")


def initial() -> ArrayRecord:
    """A small model with a counter."""
    return ArrayRecord({"x": Array(X_0.copy()), "n": Array(np.array(0, np.int64))})


def start(grid: FakeGrid, rule: str | Rule = "fedasync", /, *, arrays: Any = None, **options: Any) -> Result:
    """Run on the grid's clock; options are those of FedAsync, but for those of `start`."""
    names = ("num_rounds", "timeout", "train_config", "evaluate_config", "evaluate_fn")
    own = {name: options.pop(name) for name in names if name in options}
    strategy = FedAsync(rule, poll_s=0.25, nodes_every_s=0.5, **options)
    strategy.clock_from = lambda at: FakeClock(grid, at)  # type: ignore[assignment,return-value]
    return strategy.start(grid=grid, initial_arrays=initial() if arrays is None else arrays, **own)


def one_file() -> Any:
    """The paper's algorithm in one file: the oracle."""
    path = Path(__file__).parents[2] / "examples" / "fedasync_one_file.py"
    spec = importlib.util.spec_from_file_location("fedasync_one_file", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
