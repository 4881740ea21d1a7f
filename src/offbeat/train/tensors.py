"""Owns how a user's data become tensors, and which accelerator they lie on."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offbeat.errors import InvalidValue


def tensor_of(part: Any) -> Tensor:
    """From numpy or torch, with floats as float32 and whole numbers as int64."""
    tensor = torch.as_tensor(part.copy() if isinstance(part, np.ndarray) and not part.flags.writeable else part)
    if tensor.is_floating_point():
        return tensor.float()
    return tensor if tensor.dtype in (torch.bool, torch.uint8) else tensor.long()


def accelerator_of(name: str) -> torch.device:
    if name != "auto":
        try:
            return torch.device(name)
        except RuntimeError:
            raise InvalidValue(f"accelerator is {name!r}; use auto, cpu, cuda or mps") from None
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
