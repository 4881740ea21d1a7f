"""Owns a torch module whose parameters, gradients and float buffers are views into flat tensors.

Rules kept here:
- Loading x_tau is one copy, and so is storing x_new; the module's code sees ordinary parameters.
- Frozen parameters, and BatchNorm's statistics unless they mix, do not travel: they stay in the module.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from offbeat.core.layout import Array, Layout, Model, same_layout
from offbeat.errors import InvalidValue


class FlatModule:
    """A module laid out flat: `values` holds parameters then float buffers, `gradients` the parameters' gradients."""

    def __init__(self, module: nn.Module, *, mix_statistics: bool, accelerator: torch.device) -> None:
        self.module = module
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = _travelling_buffers(module, mix_statistics)
        tensors = parameters | buffers
        _refuse_other_floats(tensors)
        frozen = {name for name, parameter in parameters.items() if not parameter.requires_grad}
        self.layout = Layout.of(
            {name: tensor.detach().numpy() for name, tensor in tensors.items()}, buffers=buffers.keys(), frozen=frozen
        )
        self.values = torch.empty(self.layout.size, device=accelerator)
        self.parameters = self.values[: self.layout.parameter_size]
        self.gradients = torch.zeros(self.layout.parameter_size, device=accelerator)
        self.carried: dict[str, Tensor] = {}
        self._buffers: dict[str, Tensor] = {}
        module.to(accelerator)
        with torch.no_grad():
            for name, slot in self.layout.places.items():
                place = slice(slot.offset, slot.offset + slot.size)
                view = self.values[place].view(slot.shape)
                view.copy_(tensors[name])
                if name in parameters:
                    parameters[name].data = view
                    parameters[name].grad = self.gradients[place].view(slot.shape)
                else:
                    self._buffers[name] = view
        for carried in self.layout.carried:
            self._buffers[carried.name] = self.carried[carried.name] = module.get_buffer(carried.name)
        self._bind_buffers()

    def load(self, model: Model) -> None:
        same_layout(self.layout, model.layout)
        self._bind_buffers()
        with torch.no_grad():
            _copy(model.vector, self.values)
            for name, buffer in self.carried.items():
                _copy(model.carried[name], buffer)

    def store(self, model: Model) -> None:
        for name, ours in self._buffers.items():
            theirs = self.module.get_buffer(name)
            if theirs is not ours:  # the module's code replaced the tensor instead of writing into it
                ours.copy_(theirs.detach())
        torch.from_numpy(model.vector).copy_(self.values)
        for name, buffer in self.carried.items():
            torch.from_numpy(model.carried[name]).copy_(buffer)

    def _bind_buffers(self) -> None:
        for name, buffer in self._buffers.items():
            owner, _, leaf = name.rpartition(".")
            setattr(self.module.get_submodule(owner), leaf, buffer)

    def statistics(self) -> Iterable[tuple[str, float]]:
        """BatchNorm's running means and variances by name, with their momentum."""
        for name, layer in _statistics(self.module):
            if layer.momentum is not None and not name.endswith("num_batches_tracked"):
                yield name, layer.momentum

    def batch_norms(self) -> Iterable[_BatchNorm]:
        return (m for m in self.module.modules() if isinstance(m, _BatchNorm) and m.track_running_stats)


def _copy(array: Array, tensor: Tensor) -> None:
    """From numpy to torch; torch.from_numpy does not take published models, which are read-only."""
    if tensor.device.type == "cpu":
        np.copyto(tensor.numpy(), array)
    else:
        tensor.copy_(torch.tensor(array))


def _statistics(module: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """The names of BatchNorm's buffers, with their layers."""
    for prefix, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            for name, _ in layer.named_buffers(prefix, recurse=False):
                yield name, layer


def _travelling_buffers(module: nn.Module, mix_statistics: bool) -> dict[str, Tensor]:
    saved = module.state_dict().keys()  # a buffer that is not persistent is a constant of the code, and stays
    statistics = dict(_statistics(module))
    return {
        name: buffer
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if name in saved and (mix_statistics or name not in statistics)
    }


def _refuse_other_floats(tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.dtype != torch.float32:
            raise InvalidValue(
                f"{name!r} is {tensor.dtype}: parameters and float buffers must be float32; try model.float()"
            )
