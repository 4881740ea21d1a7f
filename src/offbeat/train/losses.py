"""Owns losses over lanes: values and gradients of many small losses, each over its own batch, in a few calls.

Rules kept here:
- The loss of a lane is the sum of its samples' losses times their weights: 1/size for a sample of the batch, 0 for one
  that only fills the batch up to the shape of the other lanes'. So its gradient is that of the lane alone.
- A loss of the user's own is applied to each lane by torch.vmap; it has no weights.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offbeat.train.solver import Loss


class LaneLoss(Protocol):
    """A loss over lanes; it collects intermediate values, and computes the losses of many iterations in one call."""

    weighted: bool
    """Whether it applies the weights of samples; if not, it takes the first `count` of every lane."""
    seen: list[Any]
    """Intermediate values of every iteration since the last call of `losses`."""

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor, count: int) -> Tensor:
        """The gradient of every lane's loss with respect to its outputs."""
        ...

    def losses(self, weights: Tensor) -> Tensor:
        """The loss of every iteration since the last call and every lane, given the weights of all of them."""
        ...


def lane_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> LaneLoss:
    """The form over lanes of a loss, chosen by the loss and the tensors that it is called with."""
    classes = outputs.dim() == 2 and targets.dim() == 1 and targets.dtype == torch.int64
    if classes and (loss is nn.functional.cross_entropy or _is_default(loss, nn.CrossEntropyLoss)):
        return CrossEntropy()
    if outputs.shape == targets.shape and (loss is nn.functional.mse_loss or _is_default(loss, nn.MSELoss)):
        return Mse()
    return _Vectorised(loss)


class CrossEntropy:
    """torch's cross_entropy for classes, with its default arguments; no class is ignored."""

    weighted = True

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._minus_ones = torch.empty(0)

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor, _: int) -> Tensor:
        places = targets.unsqueeze(-1)
        z = outputs - outputs.amax(-1, keepdim=True)
        p = z.exp()
        total = p.sum(-1, keepdim=True)
        self.seen.append((total, z.gather(-1, places)))
        if self._minus_ones.shape != places.shape:
            self._minus_ones = torch.full(places.shape, -1.0)
        return p.div_(total).scatter_add_(-1, places, self._minus_ones).mul_(weights)

    def losses(self, weights: Tensor) -> Tensor:
        total, picked = (torch.stack(parts) for parts in zip(*self.seen, strict=True))
        self.seen.clear()
        return total.log_().sub_(picked).mul_(weights).sum((2, 3))


class Mse:
    """torch's mse_loss, with its default arguments."""

    weighted = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def gradient(self, outputs: Tensor, targets: Tensor, weights: Tensor, _: int) -> Tensor:
        difference = (outputs - targets).flatten(2)
        self.seen.append(difference.square().mean(-1, keepdim=True))
        return difference.mul_(weights * (2 / difference.shape[2])).view(outputs.shape)

    def losses(self, weights: Tensor) -> Tensor:
        seen = torch.stack(self.seen)
        self.seen.clear()
        return seen.mul_(weights).sum((2, 3))


class _Vectorised:
    weighted = False

    def __init__(self, loss: Loss) -> None:
        self.lanes = torch.vmap(loss)
        self.seen: list[Any] = []

    def gradient(self, outputs: Tensor, targets: Tensor, _: Tensor, count: int) -> Tensor:
        d = torch.zeros_like(outputs)
        with torch.enable_grad():
            leaf = outputs[:, :count].detach().requires_grad_()
            losses = self.lanes(leaf, targets[:, :count])
            (d[:, :count],) = torch.autograd.grad(losses.sum(), leaf)
        self.seen.append(losses.detach())
        return d

    def losses(self, _: Tensor) -> Tensor:
        seen = torch.stack(self.seen)
        self.seen.clear()
        return seen


def _is_default(loss: Loss, kind: type[nn.Module]) -> bool:
    plain, names = kind(), ("reduction", "ignore_index", "label_smoothing", "weight")
    return type(loss) is kind and all(getattr(loss, name, None) == getattr(plain, name, None) for name in names)
