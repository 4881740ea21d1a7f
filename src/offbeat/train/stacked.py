"""Owns the tensor program that trains several copies of one module at once, each in its lane, and losses over lanes.

Rules kept here:
- Parameters are one (lanes, stride) tensor, every named array a (lanes, *shape) view of it. A layer works on all lanes
  in one call, and its backward pass is written out: for such small layers autograd costs more than the arithmetic.
- The bits of a lane depend neither on the other lanes nor on its place. A model always has the same number of lanes,
  used or not, and tensors are multiples of what torch's vector loops take in one turn, so no lane falls into the rest
  that they calculate number by number. MKL's products differ with the alignment of their operands, so all lanes of a
  tensor are aligned alike. For both, batches are filled up to a multiple of `grain` samples.
- The loss of a lane is the sum of its samples' losses times their weights: 1/size for a sample of the batch, 0 for one
  that only fills the batch up to the shape of the other lanes'. So its gradient is that of the lane alone.
"""

from collections.abc import Callable, Sequence
from copy import copy
from math import gcd, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offbeat.core.layout import ALIGNMENT, Layout, Vector, aligned_copy
from offbeat.train.sgd import Loss
from offbeat.train.solver import Solver

FLOATS_IN_A_TURN = 32
"""Floats that torch's vector loops take at once: two registers of 16."""
FLOATS_ALIGNED = ALIGNMENT // 4

_aten: Any = torch.ops.aten
_BACKWARD: dict[type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda _, d, __, y: _aten.threshold_backward(d, y, 0),
    nn.LeakyReLU: lambda layer, d, x, _: _aten.leaky_relu_backward(d, x, layer.negative_slope, False),
    nn.Tanh: lambda _, d, __, y: _aten.tanh_backward(d, y),
    nn.Sigmoid: lambda _, d, __, y: _aten.sigmoid_backward(d, y),
    nn.GELU: lambda layer, d, x, _: _aten.gelu_backward(d, x, approximate=layer.approximate),
    nn.SiLU: lambda _, d, x, __: _aten.silu_backward(d, x),
    nn.Softplus: lambda layer, d, x, _: _aten.softplus_backward(d, x, layer.beta, layer.threshold),
    nn.ELU: lambda layer, d, x, _: _aten.elu_backward(d, layer.alpha, 1, 1, False, x),
}


def lanes_for(parameters: int) -> int:
    """The number of lanes for a model: many where calls cost more than arithmetic, few where idle lanes do.

    Measured with 2 to 100 trainings at a time on perceptrons of 2 to 400 thousand parameters.

    >>> [lanes_for(parameters) for parameters in (2_410, 39_760, 159_010)]
    [16, 8, 4]
    """
    return 16 if parameters <= 2**13 else 8 if parameters <= 2**16 else 4


class Views(NamedTuple):
    values: Tensor
    gradients: Tensor


class _Linear:
    """One layer of all lanes: inputs and outputs are (lanes, batch, ...).

    `backward` keeps the gradients of the parameters; it returns the gradient of the inputs if `further`, else `d`.
    """

    def __init__(self, weight: Views, bias: Views | None) -> None:
        self.weight, self.bias = weight, bias
        self.x, shape = weight.values, weight.values.shape
        self.product = None if prod(shape[1:]) % FLOATS_ALIGNED else torch.empty(shape)

    def forward(self, x: Tensor) -> Tensor:
        self.x = rows = x if x.dim() == 3 else x.flatten(1, -2)
        across = self.weight.values.mT
        y = torch.bmm(rows, across) if self.bias is None else torch.baddbmm(self.bias.values, rows, across)
        return y if x.dim() == 3 else y.view(*x.shape[:-1], -1)

    def backward(self, d: Tensor, *, further: bool) -> Tensor:
        rows = d if d.dim() == 3 else d.flatten(1, -2)
        if self.product is None:
            torch.bmm(rows.mT, self.x, out=self.weight.gradients)
        else:  # bmm is three times as fast without gaps between lanes
            self.weight.gradients.copy_(torch.bmm(rows.mT, self.x, out=self.product))
        if self.bias is not None:
            torch.sum(rows, 1, keepdim=True, out=self.bias.gradients)
        if not further:
            return d
        below = torch.bmm(rows, self.weight.values)
        return below if d.dim() == 3 else below.view(*d.shape[:-1], -1)


class _Activation:
    def __init__(self, layer: nn.Module) -> None:
        self.layer = copy(layer)
        vars(self.layer)["inplace"] = False  # the backward pass may need the input
        self.apply: Callable[[Tensor], Tensor] = self.layer.forward
        self.back = _BACKWARD[type(layer)]

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        self.y = self.apply(x)
        return self.y

    def backward(self, d: Tensor, *, further: bool) -> Tensor:
        return self.back(self.layer, d, self.x, self.y) if further else d


class _Flatten:
    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return x.flatten(2)

    def backward(self, d: Tensor, *, further: bool) -> Tensor:
        return d.reshape(self.shape) if further else d


Layer = _Linear | _Activation | _Flatten


class CrossEntropy:
    """torch's cross_entropy for classes, with its default arguments; no class is ignored.

    Like every loss here, it collects in `seen` what `losses` then turns into the losses of many iterations at once.
    """

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
    """A loss of the user's own: torch.vmap applies it to each lane. It takes the first `count` samples of a batch."""

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


LaneLoss = CrossEntropy | Mse | _Vectorised


def lane_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> LaneLoss:
    """The form over lanes of a loss, chosen by the loss and the tensors that it is called with."""
    classes = outputs.dim() == 2 and targets.dim() == 1 and targets.dtype == torch.int64
    if classes and (loss is nn.functional.cross_entropy or _is_default(loss, nn.CrossEntropyLoss)):
        return CrossEntropy()
    if outputs.shape == targets.shape and (loss is nn.functional.mse_loss or _is_default(loss, nn.MSELoss)):
        return Mse()
    return _Vectorised(loss)


def _is_default(loss: Loss, kind: type[nn.Module]) -> bool:
    plain, names = kind(), ("reduction", "ignore_index", "label_smoothing", "weight")
    return type(loss) is kind and all(getattr(loss, name, None) == getattr(plain, name, None) for name in names)


class Program:
    """Trainings of one module, lane beside lane, iteration by iteration."""

    def __init__(self, module: nn.Module, layout: Layout, loss: LaneLoss, solver: Solver) -> None:
        self.size, stride = layout.size, -(-layout.size // FLOATS_ALIGNED) * FLOATS_ALIGNED
        self.lanes = lanes_for(layout.parameter_size)
        self.x, self.x_tau, self.gradients = (torch.zeros(self.lanes, stride) for _ in range(3))
        self.rows = self.x.numpy()
        self.layers, self.loss, self.solver = _layers(module, layout, (self.x, self.gradients)), loss, solver
        linear = [(place, layer) for place, layer in enumerate(self.layers) if isinstance(layer, _Linear)]
        self.first = linear[0][0]
        widths = [width for _, layer in linear for width in layer.weight.values.shape[1:]]
        grains = [FLOATS_ALIGNED // gcd(FLOATS_ALIGNED, width) for width in widths]
        self.grain = max(*grains, FLOATS_IN_A_TURN // self.lanes)
        self.rates = self.pulls = torch.zeros(self.lanes, 1)

    def load(self, starts: Sequence[Vector], gammas: Sequence[float]) -> None:
        """Begin one training per lane from its x_tau and with its gamma; the other lanes idle at 0."""
        self.loss.seen.clear()
        rows = self.rows
        for row, start in zip(rows, starts, strict=False):
            row[: self.size] = start
        rows[len(starts) :] = 0
        if self.solver.rho:
            self.x_tau.copy_(self.x)
        rates = torch.zeros(self.lanes, 1, dtype=torch.float64)
        rates.numpy()[: len(gammas), 0] = gammas
        self.rates, self.pulls = rates.float(), (rates * self.solver.rho).float()

    def iterate(self, inputs: Tensor, targets: Tensor, weights: Tensor, count: int) -> None:
        for layer in self.layers:
            inputs = layer.forward(inputs)
        d = self.loss.gradient(inputs, targets, weights, count)
        for place in range(len(self.layers) - 1, self.first - 1, -1):
            d = self.layers[place].backward(d, further=place > self.first)
        self._step()

    def taken(self, lane: int) -> Vector:
        return aligned_copy(self.rows[lane, : self.size])

    def _step(self) -> None:
        solver, x, gradients = self.solver, self.x, self.gradients
        if solver.clip is not None:
            norms = torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
            gradients.mul_((solver.clip / norms).clamp_(max=1))
        if solver.weight_decay:
            gradients.add_(x, alpha=solver.weight_decay)
        if solver.rho:
            x.lerp_(self.x_tau, self.pulls)
        x.addcmul_(gradients, self.rates, value=-1)


def obstacle(module: nn.Module, name: str = "") -> str | None:
    """Why this module cannot be a tensor program over lanes; None where it can."""
    kind, called = type(module), f"{type(module).__name__} {name}".strip()
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
        return f"{called} has hooks, which would not be called"
    if kind is nn.Sequential:
        found = (obstacle(child, f"{name}.{place}" if name else place) for place, child in module.named_children())
        return next(filter(None, found), None)
    if isinstance(module, nn.Dropout) and module.p:
        return f"{called} draws random numbers while it trains"
    if isinstance(module, nn.Flatten) and [module.start_dim, module.end_dim] != [1, -1]:
        return f"{called} has other dimensions than start_dim=1, end_dim=-1"
    if kind in _BACKWARD or kind in (nn.Linear, nn.Flatten, nn.Identity, nn.Dropout):
        return None
    return f"{called} is not among nn.Sequential, Linear, Flatten, Identity, {', '.join(k.__name__ for k in _BACKWARD)}"


def _layers(module: nn.Module, layout: Layout, flats: tuple[Tensor, Tensor]) -> list[Layer]:
    def views(name: str) -> Views:
        slot = layout.places[name]
        shape = (len(flats[0]), *(slot.shape if len(slot.shape) == 2 else (1, *slot.shape)))
        return Views(*(flat[:, slot.offset : slot.offset + slot.size].view(shape) for flat in flats))

    layers: list[Layer] = []
    for name, leaf in module.named_modules(remove_duplicate=False):
        if isinstance(leaf, nn.Linear):
            prefix = f"{name}." if name else ""
            layers.append(_Linear(views(f"{prefix}weight"), None if leaf.bias is None else views(f"{prefix}bias")))
        elif isinstance(leaf, nn.Flatten):
            layers.append(_Flatten())
        elif type(leaf) in _BACKWARD:
            layers.append(_Activation(leaf))
    return layers
