"""Owns the PyTorch task: a model, a loss and data become `initial`, `train` and `evaluate`.

Rules kept here:
- Everything a user writes is an argument of `Task`; there is nothing to subclass.
- The data of a device are loaded when they are needed, and never leave the process.
- BatchNorm: `mix` lets the running statistics travel and mix like any float (the counter follows the newest);
  `newest` does too, as if every worker had started from the newest statistics (the authors' simulation);
  `keep_local` leaves them on the device, and the global model is evaluated on each test batch's own statistics;
  `recompute` leaves them on the device too, and computes the global model's from `calibration` before evaluating.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from typing import Any, NamedTuple, Self, get_args

import numpy as np
import torch
from torch import Tensor, nn

from offbeat.core.layout import Model
from offbeat.errors import InvalidValue
from offbeat.task import Trained, Work
from offbeat.train.carried import CARRIED_BYTES_MAX, SOLVERS_CACHED, CarriedTask, leased
from offbeat.train.compiled_chain import chain_of
from offbeat.train.evaluation import (
    EVALUATION_BATCH,
    MIXED,
    BatchNormPolicy,
    Derived,
    Metric,
    default_metrics,
    measured,
    statistics,
)
from offbeat.train.flat import FlatModule
from offbeat.train.lanes import Lanes, lanes_of
from offbeat.train.layer_chain import Chain
from offbeat.train.programs import full_batch_obstacle, program_obstacle, program_of
from offbeat.train.samples import Samples
from offbeat.train.sgd import Batch, Loss, keyed, one_thread, seeded, solve_proximal
from offbeat.train.solver import Solver
from offbeat.train.tensors import accelerator_of, tensor_of

Data = Callable[[int], tuple[Any, Any]] | Sequence[tuple[Any, Any]]

WARM_UP_NUMBER = 2**31
"""The task number that keys a warm-up's randomness: no device ever does that many tasks."""
DEVICES_CACHED = 1024


class WarmUp(NamedTuple):
    """Training before x_0 is published: passes over the data of these devices, at a rate of its own."""

    devices: Sequence[int] | None
    """None means all devices."""
    passes: int
    gamma: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `0,5,0.01` or `all,1,0.1`: devices, passes, gamma.

        >>> WarmUp.parse("0,5,0.01")
        WarmUp(devices=(0,), passes=5, gamma=0.01)
        """
        try:
            device, passes, gamma = text.split(",")
            found = cls(None if device == "all" else (int(device),), int(passes), float(gamma))
            if found.passes >= 1 and found.gamma > 0 and min(found.devices or (0,)) >= 0:
                return found
        except ValueError:
            pass
        raise InvalidValue(f"warm_up is {text!r}; write it as DEVICE,PASSES,GAMMA, like 0,5,0.01 or all,1,0.1")


class Task:
    """A federated PyTorch task: everything that a user writes.

    model: a module, or a function that makes one. loss(output, target): the mean over the batch.
    data: (inputs, targets) of every device, as a list or as a function of the device's number.
    test: (inputs, targets) for evaluation; None where the server has none.
    held_out: likewise per device, as `data`: workers measure the model that they receive on it, for a server that has
    no test data; a simulated run measures its result on it, device by device.
    metrics: name -> function(output, target), per sample or a mean; by default accuracy where targets are classes.
    derived: name -> function of the means over all test data, such as the perplexity of the loss.
    evaluation_batch: samples that are evaluated at a time, in their order.
    warm_up: training on one machine before x_0 is published.
    calibration: inputs for `recompute`; by default those of the test data.
    accelerator: cpu, cuda, mps, or auto.

    If the module has a method `begin`, it is called at the start of every training and evaluation: a module that
    carries a hidden state from batch to batch resets it there.
    """

    def __init__(
        self,
        model: nn.Module | Callable[[], nn.Module],
        loss: Loss,
        data: Data,
        test: tuple[Any, Any] | None = None,
        *,
        held_out: Data | None = None,
        gamma: float = 0.1,
        rho: float = 0.005,
        weight_decay: float = 0.0,
        clip: float | None = None,
        batch_size: int = 50,
        local_passes: int | None = None,
        local_iterations: int | None = None,
        metrics: Mapping[str, Metric] | None = None,
        derived: Mapping[str, Derived] | None = None,
        evaluation_batch: int = EVALUATION_BATCH,
        warm_up: WarmUp | None = None,
        batch_norm: BatchNormPolicy = "mix",
        calibration: Any = None,
        accelerator: str = "auto",
    ) -> None:
        self._arguments = {name: value for name, value in locals().items() if name != "self"}
        if batch_norm not in get_args(BatchNormPolicy):
            raise InvalidValue(f"batch_norm is {batch_norm!r}; use one of {', '.join(get_args(BatchNormPolicy))}")
        self.model, self.loss, self.data = model, loss, data
        self.solver = Solver(gamma, rho, weight_decay, clip, batch_size, local_passes, local_iterations)
        self.batch_norm = batch_norm
        self.accelerator = accelerator_of(accelerator)
        self.test = None if test is None else self._tensors("test", test)
        self.held_out = held_out
        self.metrics = metrics
        self.derived, self.evaluation_batch, self.warm_up = derived or {}, evaluation_batch, warm_up
        self.calibration = None if calibration is None else tensor_of(calibration).to(self.accelerator)
        self.ordinary_iterations: float | None = None
        """Local iterations of a device's task, where the data were pooled and the devices no longer tell."""
        self.device_data = lru_cache(DEVICES_CACHED)(self._device_data)
        self._solvers = lru_cache(SOLVERS_CACHED)(leased)
        self._program: Loss | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Task, **self._arguments), ()

    @property
    def devices(self) -> int | None:
        """The number of devices with data; None where `data` is a function."""
        return None if callable(self.data) else len(self.data)

    @property
    def gamma(self) -> float:
        """The local rate where the scheduler sets none."""
        return self.solver.gamma

    @property
    def batch_size(self) -> int:
        return self.solver.batch_size

    @property
    def local_passes(self) -> int | None:
        """Passes over a device's data per training; None where `local_iterations` says how much it trains."""
        return None if self.solver.local_iterations else self.solver.local_passes or 1

    @property
    def local_iterations(self) -> int | None:
        return self.solver.local_iterations

    def samples(self, device: int) -> int:
        """How many samples a device holds."""
        return len(self.device_data(device)[0])

    def frozen(self) -> dict[str, np.ndarray]:
        """The parameters that are not trained, by name: they do not travel, and must be alike on all workers."""
        parameters = self._flat.module.named_parameters()
        return {name: value.detach().cpu().numpy() for name, value in parameters if not value.requires_grad}

    def with_settings(self, **changes: Any) -> "Task":
        """This task with other settings: gamma, rho, weight_decay, warm_up, batch_size, local_passes and so on."""
        if isinstance(changes.get("warm_up"), str):
            changes["warm_up"] = WarmUp.parse(changes["warm_up"])
        if "local_passes" in changes:
            changes = {"local_iterations": None, **changes}
        elif "local_iterations" in changes:
            changes = {"local_passes": None, **changes}
        return Task(**{**self._arguments, **changes})

    def pooled(self, devices: int | None = None) -> "Task":
        """This task with the data of all devices on one: single-machine SGD trains on it."""
        count = devices or self.devices
        if count is None:
            raise InvalidValue("data is a function, so say with `devices` how many devices to pool")
        everybody = [self._device_data(device) for device in range(count)]
        inputs, targets = (torch.cat(parts) for parts in zip(*everybody, strict=True))
        pooled = Task(**{**self._arguments, "data": [(inputs, targets)]})
        if self.warm_up is not None and self.warm_up.devices is not None:
            raise InvalidValue("a warm-up on some devices makes no sense where all data are on one machine; use all")
        iterations = [self.solver.iterations(len(inputs)) for inputs, _ in everybody]
        pooled.ordinary_iterations = sum(iterations) / count
        return pooled

    def iterations(self, work: Work) -> int:
        return self._leased(work).iterations(len(self.device_data(work.device)[0]))

    def initial(self, seed: int) -> Model:
        flat = self._made(seed)
        if self.warm_up is not None:
            self._warmed_up(flat, self.warm_up, seed)
        carried = {name: buffer.cpu().numpy() for name, buffer in flat.carried.items()}
        return Model(flat.layout, flat.values.cpu().numpy(), carried).copy()

    def train(self, model: Model, work: Work) -> Trained:
        """Solve the device's proximal problem from x_tau; leaves x_new in the model."""
        received = self.evaluate_on(model, work.device) if self.test is None else {}
        flat = self._flat
        flat.load(model)
        iterations, loss = self._solved(flat, self._leased(work), work, flat.parameters.clone())
        flat.store(model)
        return Trained(len(self.device_data(work.device)[0]), iterations, {"training_loss": loss, **received})

    def _solved(self, flat: FlatModule, solver: Solver, work: Work, x_tau: Tensor) -> tuple[int, float]:
        inputs, targets = self.device_data(work.device)
        _begin(flat.module)
        with keyed(work) as rng:
            indices = map(torch.from_numpy, solver.batches(len(inputs), rng))
            try:
                batches = ((inputs[batch], targets[batch]) for batch in indices)
                program = self._program if flat is self._flat else None
                return solve_proximal(solver, flat, self.loss, batches, x_tau, program)
            except ValueError as error:
                raise _explained(error, work.device, len(inputs)) from error

    def evaluate_on(self, model: Model, device: int) -> dict[str, float]:
        """Loss and metrics on what a device holds out; empty where nothing is held out."""
        if self.held_out is None or (not callable(self.held_out) and device >= len(self.held_out)):
            return {}
        data = self.held_out(device) if callable(self.held_out) else self.held_out[device]
        return self._measured(model, self._tensors(f"the held-out data of device {device}", data))

    def _warmed_up(self, flat: FlatModule, warm_up: WarmUp, seed: int) -> None:
        """Train on the data of the warm-up's devices, one after the other, with no proximal pull."""
        solver = replace(self.solver, gamma=warm_up.gamma, rho=0.0, local_passes=warm_up.passes, local_iterations=None)
        for device in range(self.devices or 0) if warm_up.devices is None else warm_up.devices:
            self._solved(flat, solver, Work(device, WARM_UP_NUMBER, seed), flat.parameters)

    def refresh(self, w: Model, newest: Model, x_tau: Model, alpha_t: float, iterations: int) -> None:
        """Under `newest`: give w the statistics that it would have, had the worker started from the newest ones.

        Statistics follow their batches by r <- (1 - m) r + m * batch and do not influence training, so what they
        started from is left with the factor (1 - m)^iterations, and can be exchanged when the update is mixed.
        """
        if self.batch_norm != "newest":
            return
        for name, momentum in self._flat.statistics():
            left = np.float32(alpha_t * (1.0 - momentum) ** iterations)
            w[name][:] += left * (newest[name] - x_tau[name])

    def batchable(self) -> str | None:
        """Why trainings of this task cannot run together as one tensor program; None where they can."""
        return self._lanes if isinstance(self._lanes, str) else None

    def train_many(self, jobs: Sequence[tuple[Model, Work]]) -> tuple[list[tuple[Model, Trained]], int]:
        """Train all jobs together: x_new and report of each, and the number of runs of the program."""
        lanes = self._lanes
        if isinstance(lanes, str):
            raise InvalidValue(f"trainings of this task cannot run together: {lanes}; train one at a time")
        with one_thread(), torch.no_grad():
            return lanes.train([(x_tau, work, self._leased(work)) for x_tau, work in jobs])

    def compilable(self) -> str | None:
        """Why trainings of this task cannot run as a compiled loop; None where they can."""
        return self._chain if isinstance(self._chain, str) else None

    def train_compiled(self, jobs: Sequence[tuple[Model, Work]], threads: int) -> list[tuple[Model, Trained]]:
        """Train each job in a compiled loop, spread over the threads: x_new and report of each.

        A device whose samples do not fit the loop (a class that is ignored, say) is trained by torch.
        """
        chain = self._chain
        if isinstance(chain, str):
            raise InvalidValue(f"trainings of this task cannot be compiled: {chain}; train one at a time")
        fit = [(x_tau, work, self._leased(work)) for x_tau, work in jobs if chain.takes(work.device)]
        trained = iter(chain.train(fit, threads))
        return [next(trained) if chain.takes(work.device) else self._trained(x_tau, work) for x_tau, work in jobs]

    def evaluate_compiled(self, model: Model) -> dict[str, float]:
        """As `evaluate`, in the compiled loop where it has the test data: equal but for the last digits of the loss."""
        chain = self._chain
        if isinstance(chain, str) or chain.test is None:
            return self.evaluate(model)
        means = chain.evaluate(model)
        return means | {name: derive(means) for name, derive in self.derived.items()}

    def carried(self, devices: int, seeds: Iterable[int]) -> CarriedTask | None:
        """This task for processes that have no torch; None where they would need it, or where it is large."""
        chain = self._chain
        if isinstance(chain, str) or (chain.test is None and self.test is not None):
            return None
        if self.derived or self.held_out or self.warm_up or devices > chain.pool.devices_max:
            return None
        if not all(map(chain.takes, range(devices))):
            return None
        data = [chain.pool.of(device) for device in range(devices)]
        if sum(part.nbytes for samples in data for part in samples) > CARRIED_BYTES_MAX:
            return None
        starts = {seed: self.initial(seed) for seed in seeds}
        names = getattr(self, "identity", ""), getattr(self, "known_as", ())
        return CarriedTask(chain.layers, self.solver, data, chain.test, starts, self.ordinary_iterations, *names)

    def program_obstacle(self, program: str) -> str | None:
        """Why trainings of this task cannot run as `compiled-torch` or `channels-last`; None where they can."""
        return program_obstacle(program, self._flat.module, self.accelerator) or full_batch_obstacle(program, self)

    def train_by(self, program: str) -> None:
        """Train by this program from now on; to compile may take a minute, to load what was compiled some seconds."""
        if (reason := self.program_obstacle(program)) is not None:
            raise InvalidValue(f"executor {program} is not possible: {reason}")
        self._program = program_of(program, self, self._flat, partial(_begin, self._flat.module))

    def _trained(self, x_tau: Model, work: Work) -> tuple[Model, Trained]:
        x_new = x_tau.copy()
        return x_new, self.train(x_new, work)

    def evaluate(self, model: Model) -> dict[str, float]:
        """Loss and metrics on the test data; empty without test data."""
        return {} if self.test is None else self._measured(model, self.test)

    def _measured(self, model: Model, data: Batch) -> dict[str, float]:
        flat, batch = self._flat, self.evaluation_batch
        flat.load(model)
        flat.module.eval()
        _begin(flat.module)
        calibration = data[0] if self.calibration is None else self.calibration
        layers = list(flat.batch_norms())
        with one_thread(), torch.no_grad(), statistics(flat.module, layers, self.batch_norm, calibration, batch):
            metrics = default_metrics(data) if self.metrics is None else self.metrics
            return measured(flat.module, data, {"loss": self.loss, **metrics}, self.derived, batch)

    @cached_property
    def _lanes(self) -> Lanes | str:
        with one_thread():
            return lanes_of(self._flat, self.loss, self.solver, self._samples, DEVICES_CACHED)

    @cached_property
    def _chain(self) -> Chain | str:
        with one_thread():
            usual = None if self.metrics is not None else self.test
            return chain_of(self._flat, self.loss, self.solver, self._samples, usual, DEVICES_CACHED)

    @cached_property
    def _flat(self) -> FlatModule:
        """The module that trains and evaluates; its frozen parameters are the same in every run and on every worker."""
        return self._made(0)

    def _made(self, seed: int) -> FlatModule:
        with seeded(np.random.default_rng(seed)):
            module = copy.deepcopy(self.model) if isinstance(self.model, nn.Module) else self.model()
        if not isinstance(module, nn.Module):
            raise InvalidValue(f"model must be a torch.nn.Module or a function that makes one, not {module!r}")
        return FlatModule(module, mix_statistics=self.batch_norm in MIXED, accelerator=self.accelerator)

    def _leased(self, work: Work) -> Solver:
        return self._solvers(self.solver, work.gamma, work.local_iterations)

    def _device_data(self, device: int) -> Batch:
        if callable(self.data):
            return self._tensors(f"device {device}", self.data(device))
        if device >= len(self.data):
            raise InvalidValue(f"device {device} has no data: the task holds data for devices 0..{len(self.data) - 1}")
        return self._tensors(f"device {device}", self.data[device])

    def _samples(self, device: int) -> Samples:
        inputs, targets = self._device_data(device)
        return inputs.detach().numpy(), targets.detach().numpy()

    def _tensors(self, owner: str, pair: tuple[Any, Any]) -> Batch:
        inputs, targets = (tensor_of(part).to(self.accelerator) for part in pair)
        if len(inputs) != len(targets):
            raise InvalidValue(f"{owner} has {len(inputs)} inputs but {len(targets)} targets")
        if len(inputs) == 0:
            raise InvalidValue(f"{owner} has no samples; leave it out, or give it at least one")
        return inputs, targets


def _begin(module: nn.Module) -> None:
    begin = getattr(module, "begin", None)
    if callable(begin):
        begin()


def _explained(error: ValueError, device: int, samples: int) -> ValueError:
    """torch's error about BatchNorm and a single sample, with what to do about it."""
    if "more than 1 value per channel" not in str(error):
        return error
    return InvalidValue(
        f"device {device} has {samples} samples, which leaves a batch of one; BatchNorm needs two: "
        "choose another batch_size, or use local_iterations"
    )
