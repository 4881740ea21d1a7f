"""Owns the proximal term on a Flower node: rho/2 ||x - x_tau||^2 in the local objective, without touching its code.

Rules kept here:
- While a ClientApp trains, every step of a torch optimizer on its thread sees the gradient of the proximal term,
  rho (x - x_tau), added to the gradient of the loss.
- x_tau is the received model. A parameter is recognised by its value before its first step, which equals a received
  array; one that was not received (a head of the node's own) has no x_tau and is left alone.
- An optimizer that makes its gradient within its step is refused. A training in which no received parameter was
  stepped is warned about.
"""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, MessageType, RecordDict

from offbeat.core.layout import Array
from offbeat.errors import InvalidValue, MissingExtra

RHO = "rho"
"""The name of the proximal weight in the config that the server sends."""

log = logging.getLogger("flwr.offbeat")


def proximal_mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """Adds the proximal term to the training of a torch ClientApp, with the rho that the server sends."""
    rho = rho_of(message.content) if message.has_content() else 0.0
    if not rho or not message.metadata.message_type.startswith(MessageType.TRAIN):
        return call_next(message, context)
    received = [array.numpy() for record in message.content.array_records.values() for array in record.values()]
    pull = ProximalPull(rho, received)
    try:
        from torch.optim.optimizer import register_optimizer_step_pre_hook
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch") from error
    hook = register_optimizer_step_pre_hook(pull.before_step)
    try:
        return call_next(message, context)
    finally:
        hook.remove()
        pull.warn_if_unused()


def rho_of(content: RecordDict) -> float:
    """The proximal weight that a message asks for; 0 where it asks for none."""
    found = [config[RHO] for config in content.config_records.values() if RHO in config]
    rho = found[0] if found else 0.0
    if not isinstance(rho, int | float) or not 0 <= rho < float("inf"):
        raise InvalidValue(f"rho is {rho!r} but must be a finite number >= 0")
    return float(rho)


class ProximalPull:
    def __init__(self, rho: float, received: Iterable[Array]) -> None:
        self.rho = rho
        self.steps = 0
        """Optimizer steps that got the proximal term."""
        self._by_shape: dict[tuple[int, ...], list[Array]] = {}
        for array in received:
            self._by_shape.setdefault(array.shape, []).append(array)
        self._x_tau: dict[Any, Any] = {}
        """By parameter; None where it was not received."""
        self._thread = threading.get_ident()

    def before_step(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before every step of every optimizer, when the gradients are complete."""
        if threading.get_ident() != self._thread:
            return
        if kwargs.get("closure") is not None or any(callable(argument) for argument in args[1:]):
            raise InvalidValue(
                f"{type(optimizer).__name__} makes its gradient within step(closure), where no mod can add to it; "
                "step without a closure, or add the proximal term to the loss"
            )
        pulled = [self._add(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self.steps += any(pulled)

    def _add(self, parameter: Any) -> bool:
        if parameter not in self._x_tau:
            self._x_tau[parameter] = self._start(parameter)
        x_tau = self._x_tau[parameter]
        if x_tau is None:
            return False
        parameter.grad.add_(parameter.detach() - x_tau, alpha=self.rho)
        return True

    def _start(self, parameter: Any) -> Any:
        """The value of a parameter before its first step, if it is that of a received array; else None."""
        now = parameter.detach()
        alike = self._by_shape.get(tuple(now.shape), ())
        return now.clone() if any(bool((now == now.new_tensor(array)).all()) for array in alike) else None

    def warn_if_unused(self) -> None:
        if not self.steps:
            log.warning(
                "rho is %g, but no torch optimizer stepped a received parameter: this training had no proximal term",
                self.rho,
            )
