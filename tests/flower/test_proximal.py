"""The proximal mod against the objective with the term written out, on a torch ClientApp that knows nothing of it."""

import logging
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from offbeat.errors import InvalidValue
from offbeat.flower import proximal_mod
from tests.flower.fake import reply

pytestmark = pytest.mark.slow

RHO = 0.3
STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum and weight decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
}


def make_net() -> nn.Module:
    """With BatchNorm, and with two biases that begin as the same zeros."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3), nn.Linear(3, 2))
    with torch.no_grad():
        for layer in (net[0], net[2]):
            layer.bias.zero_()  # type: ignore[operator]
    return net


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(2)
    return [(torch.randn(8, 4, generator=rng), torch.randint(0, 2, (8,), generator=rng)) for _ in range(STEPS)]


def train(net: nn.Module, optimizer: torch.optim.Optimizer, term: Callable[[], Any] = lambda: 0.0) -> None:
    for pixels, labels in batches():
        optimizer.zero_grad()
        (nn.functional.cross_entropy(net(pixels), labels) + term()).backward()
        optimizer.step()


def message(arrays: dict[str, Any], config: dict[str, Any], kind: str = "train") -> Message:
    content = RecordDict({"arrays": ArrayRecord(arrays), "config": ConfigRecord(config)})
    asked = Message(content, 7, kind)
    asked.metadata.__dict__["_message_id"] = "asked"
    return asked


def context() -> Context:
    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})


def app(optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> ClientApp:
    """A ClientApp as in Flower's quickstart, and the mod."""
    made = ClientApp(mods=[proximal_mod])

    @made.train()
    def _train(msg: Message, _context: Context) -> Message:
        net = make_net()
        net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
        train(net, optimizer_of(net.parameters()))
        metrics = MetricRecord({"num-examples": 8})
        return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)

    return made


def received() -> dict[str, torch.Tensor]:
    """Not what the net begins with, so that what is pulled towards is what was received."""
    return {
        name: value + 0.5 if value.is_floating_point() else value for name, value in make_net().state_dict().items()
    }


def by_mod(optimizer_of: Callable[[Any], torch.optim.Optimizer], rho: float) -> dict[str, torch.Tensor]:
    answer = app(optimizer_of)(message({n: Array(v.numpy()) for n, v in received().items()}, {"rho": rho}), context())
    return dict(answer.content["arrays"].to_torch_state_dict())


def by_hand(optimizer_of: Callable[[Any], torch.optim.Optimizer], rho: float) -> dict[str, torch.Tensor]:
    """rho/2 ||x - x_tau||^2, written into the loss."""
    net = make_net()
    net.load_state_dict(received())
    x_tau = [parameter.detach().clone() for parameter in net.parameters()]

    def term() -> Any:
        return rho / 2 * sum(((x - x_t) ** 2).sum() for x, x_t in zip(net.parameters(), x_tau, strict=True))

    train(net, optimizer_of(net.parameters()), term)
    return net.state_dict()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_is_the_term_in_the_objective(name: str) -> None:
    mod, hand, without = by_mod(OPTIMIZERS[name], RHO), by_hand(OPTIMIZERS[name], RHO), by_hand(OPTIMIZERS[name], 0.0)
    for key, value in hand.items():
        assert torch.allclose(mod[key].double(), value.double(), atol=2e-5), key
    weight = "0.weight"
    assert not torch.allclose(mod[weight], without[weight], atol=1e-3), "the term does something"


def test_a_step_of_sgd_is_the_paper_s() -> None:
    """x - gamma (grad f(x) + rho (x - x_tau)), twice, on f(x) = x^2/2."""
    made = ClientApp(mods=[proximal_mod])
    gamma, x_tau = 0.1, 2.0

    @made.train()
    def _train(msg: Message, _context: Context) -> Message:
        x = nn.Parameter(torch.tensor(msg.content["arrays"]["x"].numpy()))
        optimizer = torch.optim.SGD([x], lr=gamma)
        for _ in range(2):
            optimizer.zero_grad()
            (x**2 / 2).sum().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return reply(msg, {"x": x.detach().numpy()})

    answer = made(message({"x": Array(np.array([x_tau], np.float64))}, {"rho": RHO}), context())
    x = x_tau
    for _ in range(2):
        x = x - gamma * (x + RHO * (x - x_tau))
    assert answer.content["arrays"]["x"].numpy() == pytest.approx([x], abs=1e-12)


@pytest.mark.parametrize("config", [{}, {"rho": 0.0}])
def test_without_rho_nothing_changes(config: dict[str, Any]) -> None:
    arrays = {n: Array(v.numpy()) for n, v in received().items()}
    answer = app(OPTIMIZERS["sgd"])(message(arrays, config), context())
    for name, value in by_hand(OPTIMIZERS["sgd"], 0.0).items():
        assert answer.content["arrays"].to_torch_state_dict()[name].equal(value)


@pytest.mark.parametrize("rho", [-0.1, float("nan"), float("inf"), "much"])
def test_a_rho_that_is_no_weight_is_refused(rho: Any) -> None:
    with pytest.raises(InvalidValue, match="rho is"):
        proximal_mod(message({"x": Array(np.zeros(1, np.float32))}, {"rho": rho}), context(), lambda msg, _: msg)


def run_mod(body: Callable[[], None], kind: str = "train", **arrays: Any) -> None:
    """Let the mod run this in the place of a ClientApp."""
    held = {name: Array(np.asarray(array, np.float32)) for name, array in arrays.items()}

    def call(msg: Message, _context: Context) -> Message:
        body()
        return msg

    proximal_mod(message(held, {"rho": RHO}, kind), context(), call)


def step(x: nn.Parameter) -> None:
    """One step of size 1 down the slope of 0: only a pull can move x."""
    x.grad = torch.zeros_like(x)
    torch.optim.SGD([x], lr=1.0).step()


def moved(x: nn.Parameter) -> bool:
    """Is it pulled back after it was taken away from where it began?"""
    step(x)
    with torch.no_grad():
        x.add_(1.0)
    before = x.detach().clone()
    step(x)
    return not before.equal(x.detach())


def test_a_parameter_that_was_not_received_is_left_alone() -> None:
    own, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    seen: list[bool] = []
    run_mod(lambda: seen.extend([moved(own), moved(shared)]), x=[0.0, 0.0])
    assert seen == [False, True]


def test_afterwards_steps_are_as_ever_also_where_the_training_failed() -> None:
    x = nn.Parameter(torch.zeros(1))

    def fail() -> None:
        raise RuntimeError("it broke")

    with pytest.raises(RuntimeError, match="it broke"):
        run_mod(fail, x=[0.0])
    assert not _global_optimizer_pre_hooks
    assert not moved(x)


def test_other_threads_and_other_messages_are_left_alone() -> None:
    x, seen = nn.Parameter(torch.zeros(1)), list[bool]()

    def elsewhere() -> None:
        thread = threading.Thread(target=lambda: seen.append(moved(x)))
        thread.start()
        thread.join()

    run_mod(elsewhere, x=[0.0])
    run_mod(lambda: seen.append(moved(nn.Parameter(torch.zeros(1)))), "evaluate", x=[0.0])
    assert seen == [False, False]


def test_a_gradient_made_within_the_step_is_refused() -> None:
    x = nn.Parameter(torch.zeros(1))

    def closure() -> Any:
        (x**2).sum().backward()  # type: ignore[no-untyped-call]
        return 0.0

    with pytest.raises(InvalidValue, match="LBFGS makes its gradient within step"):
        run_mod(lambda: torch.optim.LBFGS([x]).step(closure), x=[0.0])  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidValue, match="within step"):
        run_mod(lambda: torch.optim.SGD([x], lr=0.1).step(closure=closure), x=[0.0])


def test_a_training_without_a_step_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "flwr.offbeat"):
        run_mod(lambda: None, x=[0.0])
    assert "no torch optimizer stepped a received parameter" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "flwr.offbeat"):
        run_mod(lambda: step(nn.Parameter(torch.zeros(1))), x=[0.0])
    assert not caplog.records
