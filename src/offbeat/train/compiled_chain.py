"""Owns which tasks are chains that compiled loops can train and evaluate, and makes the chain of one that is.

Rules kept here:
- A task that the loop cannot train gets one sentence that says why, before anything is compiled. The loop's gradient
  is compared with torch's before it is used. A device whose samples do not fit the loop is trained by the task itself.
- A test set goes with the chain where the loop measures it as torch does, and faster.
"""

from importlib import import_module
from importlib.util import find_spec

import numpy as np
import torch
from torch import nn

from offbeat.core.layout import Array, Layout
from offbeat.errors import InvalidValue
from offbeat.train.flat import FlatModule
from offbeat.train.lanes import alone, disagrees, flat_obstacle, probe
from offbeat.train.layer_chain import Chain, ChainLayers
from offbeat.train.samples import LoadSamples, SamplePool, Samples, with_classes
from offbeat.train.sgd import Batch, Loss
from offbeat.train.solver import Solver
from offbeat.train.stacked import CrossEntropy, Mse, lane_loss, obstacle

ACTIVATIONS: dict[type[nn.Module], int] = {nn.ReLU: 1, nn.Tanh: 2, nn.Sigmoid: 3}
"""Modules that may follow a linear layer, and their numbers in `loops`."""
EVALUATED_MAX = 2**22
"""Test samples times parameters: up to here the loop is the faster one."""


def chain_of(
    flat: FlatModule, loss: Loss, solver: Solver, load: LoadSamples, test: Batch | None, devices_max: int
) -> Chain | str:
    """The compiled form of a task, or one sentence that says why there is none."""
    found = _obstacle(flat)
    if found is not None:
        return found
    inputs, targets = map(torch.from_numpy, load(0))
    size = min(len(inputs), solver.batch_size)
    batch = inputs[:size], targets[:size]
    with torch.no_grad():
        outputs = flat.module(batch[0])
    kind, table = lane_loss(loss, outputs, batch[1]), _table(flat.module, flat.layout)
    of_classes = isinstance(kind, CrossEntropy)
    if not of_classes and not isinstance(kind, Mse):
        return "its loss is neither cross_entropy nor mse_loss with their default arguments"
    if inputs.dtype != torch.float32 or not (of_classes or targets.dtype == torch.float32):
        return "its samples are not float32"
    features, columns = int(table[0, 0]), int(table[-1, 1])
    if outputs.shape != (size, columns) or inputs[0].numel() != features:
        return "its samples have more dimensions than its layers"
    pool = SamplePool(with_classes(load, columns) if of_classes else load, devices_max)
    try:
        pool.place(0)
    except InvalidValue as error:
        return str(error)
    step = probe(flat, solver, size)
    chain = Chain(ChainLayers(table, flat.layout, of_classes), pool, step.solver)
    ((x_new, _),) = chain.run([step])
    if disagrees(x_new.vector, alone(flat, loss, step, batch), step.x_tau.vector):
        return "its model has another gradient in the compiled loop than in torch"
    chain.solver, chain.test = solver, _test(chain.layers, test)
    return chain


def _test(layers: ChainLayers, test: Batch | None) -> Samples | None:
    """The test data, where the loop can measure them and is faster than torch."""
    if test is None:
        return None
    inputs, targets = (part.detach().numpy() for part in test)
    features, columns = int(layers.table[0, 0]), int(layers.table[-1, 1])
    if inputs.dtype != np.float32 or inputs[0].size != features or len(inputs) * layers.layout.size > EVALUATED_MAX:
        return None
    if layers.of_classes:
        fits = targets.dtype == np.int64 and targets.ndim == 1 and targets.min() >= 0 and targets.max() < columns
    else:
        fits = targets.dtype == np.float32 and targets.shape == (len(inputs), columns)
    return (inputs, targets) if fits else None


def _obstacle(flat: FlatModule) -> str | None:
    if find_spec("numba") is None:
        return "numba is not installed (pip install 'offbeat[fast]')"
    found = flat_obstacle(flat) or module_obstacle(flat.module)
    if found is None:
        try:
            import_module("offbeat.train.loops")
        except (ImportError, RuntimeError) as error:  # numba does not fit this numpy, or has no folder for its cache
            return f"numba cannot be loaded: {error}"
    return found


def module_obstacle(module: nn.Module) -> str | None:
    """Why this module is no chain of linear layers; None where it is one."""
    found = obstacle(module)
    if found is not None:
        return found
    linear_seen = activated = False
    for _, leaf in module.named_modules(remove_duplicate=False):
        kind = type(leaf)
        if kind in (nn.Sequential, nn.Identity, nn.Dropout) or (kind is nn.Flatten and not linear_seen):
            continue
        if kind is nn.Linear:
            linear_seen, activated = True, False
        elif kind in ACTIVATIONS and linear_seen and not activated:
            activated = True
        else:
            return f"{kind.__name__} is not where a compiled loop can have it: only behind nn.Linear, and once"
    return None if linear_seen else "it has no nn.Linear"


def _table(module: nn.Module, layout: Layout) -> Array:
    rows: list[list[int]] = []
    own = 0
    for name, leaf in module.named_modules(remove_duplicate=False):
        if isinstance(leaf, nn.Linear):
            prefix = f"{name}." if name else ""
            bias = -1 if leaf.bias is None else layout.places[f"{prefix}bias"].offset
            rows.append([leaf.in_features, leaf.out_features, 0, layout.places[f"{prefix}weight"].offset, bias, own])
            own += (leaf.in_features + 1) * leaf.out_features
        elif type(leaf) in ACTIVATIONS:
            rows[-1][2] = ACTIVATIONS[type(leaf)]
    return np.array(rows, np.int64)
