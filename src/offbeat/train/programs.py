"""Owns how the loss of a batch is calculated in other ways than torch's usual one, on the CPU: `channels-last` and
`compiled-torch`.

Rules kept here:
- A program has bits of its own. They depend on the model and the batch, never on what ran before: only full batches are
  compiled, for their one shape, before the first training; shorter ones take torch's usual way. Code that would have to
  be compiled again later is refused. Layers of dropout draw what they draw without a program.
- Compiled code is kept in the cache folder, by version of torch and kind of processor. Of several processes that need
  the same code one compiles it, and the others wait for it. Compiled code has its channels last, if
  the model takes it.
- What cannot be done exactly is refused: torch's BatchNorm is not exact with channels last on the CPU.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from offbeat.data.archive import reason
from offbeat.data.cache import VARIABLE, cache_folder
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.train.flat import FlatModule
from offbeat.train.sgd import Batch, Loss, one_thread, seeded

COMPILED_TORCH, CHANNELS_LAST = "compiled-torch", "channels-last"
TORCH_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
NAMED_BY_USER = os.environ.get(TORCH_VARIABLE)
"""Read before torch's compiler is loaded, which sets the variable itself."""
OPTIONS = {"fallback_random": True, "cpp.threads": 1}
"""For the compiler: dropout draws from torch's own generator, and the code is for one thread."""
WARM_UP_BATCHES = 2
"""A module that carries a hidden state has one program for its first batch and one for all others."""
DEVICES_LOOKED_AT = 16
"""How many devices are searched for a full batch."""
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: a batch of images, or of volumes."""


class Trainee(Protocol):
    """What a program needs of a task."""

    loss: Loss

    @property
    def devices(self) -> int | None: ...

    @property
    def batch_size(self) -> int: ...

    def device_data(self, device: int, /) -> Batch: ...


def program_of(program: str, task: Trainee, flat: FlatModule, begin: Callable[[], None]) -> Loss:
    """The program of this name, ready to train; `begin` is called before the first batch of a training."""
    if program == CHANNELS_LAST:
        inputs, targets = task.device_data(0)
        channels_last = ChannelsLast(flat.module, task.loss)
        if said := _trial(channels_last, flat, (inputs[: task.batch_size], targets[: task.batch_size]), begin):
            raise InvalidValue(f"executor {program} is not possible: the model does not take it ({said})")
        return channels_last
    batch = _full_batch(task)
    if batch is None:
        raise InvalidValue(f"executor {program} is not possible: {full_batch_obstacle(program, task)}")
    return CompiledTorch(flat, task.loss, batch, begin)


def full_batch_obstacle(program: str, task: Trainee) -> str | None:
    """Why nothing of this task would be compiled; None where something would."""
    if program == CHANNELS_LAST or _full_batch(task) is not None:
        return None
    return f"no device has the {task.batch_size} samples of a full batch; choose a smaller batch_size"


def _full_batch(task: Trainee) -> Batch | None:
    """The first samples of one of the first devices; None where none of them has enough for a batch."""
    for device in range(min(task.devices or 1, DEVICES_LOOKED_AT)):
        inputs, targets = task.device_data(device)
        if len(inputs) >= task.batch_size:
            return inputs[: task.batch_size], targets[: task.batch_size]
    return None


def program_obstacle(program: str, module: nn.Module, accelerator: torch.device) -> str | None:
    """Why the module cannot be trained by this program on this machine; None where it can."""
    if accelerator.type != "cpu":
        return f"it is for the CPU, and this task trains on {accelerator.type}"
    return _compiler_obstacle() if program == COMPILED_TORCH else _format_obstacle(module)


def _format_obstacle(module: nn.Module) -> str | None:
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm):
            kind = type(layer).__name__
            return f"layer {name or 'model'!r} is {kind}, which torch calculates inexactly that way on the CPU"
    if not any(isinstance(layer, _ConvNd) for layer in module.modules()):
        return "the model has no convolution, so that nothing would be gained"
    return None


def _compiler_obstacle() -> str | None:
    if not hasattr(torch.compiler, "set_stance"):
        return f"it needs torch 2.6 or newer, and this is {torch.__version__}"
    named = os.environ.get("CXX", "clang++" if platform.system() == "Darwin" else "g++")
    if shutil.which(named) is None:
        return f"there is no C++ compiler {named!r} on this machine; install one, or name another in CXX"
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        return f"the C++ compiler needs Python's headers, which are not in {headers}; install them (python3-dev)"
    return None


# --- channels last ---------------------------------------------------------------------------------------------------


class DropoutInOrder(nn.Dropout):
    """Drops the same elements wherever the channels are: torch draws them in the order of the memory."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        if not self.training or not 0 < self.p < 1 or input.is_contiguous():
            return super().forward(input)
        kept = torch.empty(input.shape, dtype=input.dtype).bernoulli_(1 - self.p).div_(1 - self.p)
        return input.mul_(kept) if self.inplace else input * kept


class ChannelsLast:
    """The module on inputs whose channels lie side by side in memory; parameters stay where they are."""

    def __init__(self, module: nn.Module, loss: Loss) -> None:
        self._module, self._loss = module, loss
        for layer in module.modules():
            if type(layer) is nn.Dropout:
                layer.__class__ = DropoutInOrder

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        form = FORMATS.get(inputs.ndim)
        images = inputs if form is None else inputs.contiguous(memory_format=form)
        return self._loss(self._module(images), targets)


# --- compiled by torch -----------------------------------------------------------------------------------------------


class CompiledTorch:
    """The module and its loss as code that torch has compiled, for batches of one size; others are not compiled."""

    def __init__(self, flat: FlatModule, loss: Loss, batch: Batch, begin: Callable[[], None]) -> None:
        """Compiles for batches like this one, or loads the code where it was compiled before."""
        from offbeat.train.compiled_layers import exchange_layers  # loads parts of torch that others do not need

        module = flat.module

        def usual(inputs: Tensor, targets: Tensor) -> Tensor:
            return loss(module(inputs), targets)

        exchange_layers(module)
        self._shape, self._usual = batch[0].shape, usual
        channels_last = ChannelsLast(module, loss)
        whole = usual if _trial(channels_last, flat, batch, begin) else channels_last
        with _compiling(), _unchanged(flat), seeded(np.random.default_rng(0)), one_thread():
            self._compiled: Any = torch.compile(whole, dynamic=False, options=dict(OPTIONS))
            module.train()
            begin()
            try:
                for _ in range(WARM_UP_BATCHES):
                    self._compiled(*batch).backward()
            except Exception as error:
                raise InvalidValue(_failed(error)) from error

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        if inputs.shape != self._shape:
            return self._usual(inputs, targets)
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                value: Tensor = self._compiled(inputs, targets)
        except RuntimeError as error:
            if "recompile" not in str(error):
                raise
            raise InvalidValue(
                f"{COMPILED_TORCH}: the model's code goes another way than in its first {WARM_UP_BATCHES} batches, and "
                "would have to be compiled again; use the executor processes"
            ) from error
        return value


def _trial(program: Loss, flat: FlatModule, batch: Batch, begin: Callable[[], None]) -> str | None:
    """What goes wrong when the program calculates a loss, if anything: `view` does not take channels last, say."""
    with _unchanged(flat), seeded(np.random.default_rng(0)), one_thread(), torch.no_grad():
        flat.module.train()
        begin()
        try:
            program(*batch)
        except RuntimeError as error:
            return _first_line(error)
    return None


def _failed(error: Exception) -> str:
    return f"{COMPILED_TORCH}: torch cannot compile this model ({_first_line(error)}); use the executor processes"


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def compiled_code_folder() -> Path:
    """Where compiled code is kept: it is for one version of torch and one kind of processor."""
    if NAMED_BY_USER:
        return Path(NAMED_BY_USER)
    kind = hashlib.sha256(_processor().encode()).hexdigest()[:8]
    return cache_folder() / "compiled" / f"torch-{torch.__version__}-{platform.machine()}-{kind}"


def _processor() -> str:
    """What the compiler may use of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


@contextmanager
def _compiling() -> Iterator[None]:
    """Let torch keep its code in our folder; a process that compiles there already is waited for."""
    folder = compiled_code_folder().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".compiling").open("w")
    except OSError as error:
        raise OffbeatError(
            f"cannot write to {folder}: {reason(error)}; choose a folder that can be written to and has room "
            f"({VARIABLE} names it)"
        ) from error
    os.environ[TORCH_VARIABLE] = str(folder)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(lock, fcntl.LOCK_SH)  # all that have waited then load it at once
        yield


@contextmanager
def _unchanged(flat: FlatModule) -> Iterator[None]:
    """Give the module its parameters and statistics back; BatchNorm's may stay in the process from task to task."""
    state = {name: value.clone() for name, value in flat.module.state_dict().items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, value in flat.module.state_dict().items():
                value.copy_(state[name])
            flat.gradients.zero_()
