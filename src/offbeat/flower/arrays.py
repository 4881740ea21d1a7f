"""Owns the way between Flower's ArrayRecord and our flat model.

Rules kept here:
- Floats of any width are mixed in float32 and go out as they came in: same names, same order, same dtypes.
- Whole numbers and booleans (BatchNorm's counter) do not mix: they follow the newest update.
- A reply that does not fit is refused, and the error names the array. Floats may come in another width.
"""

from collections.abc import Mapping

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord

from offbeat.core.layout import Array, Layout, Model
from offbeat.errors import InvalidValue

FLOAT_BYTES_MAX = 8


class Arrays:
    """The shape of a Flower model: turns its records into models, and models into records."""

    def __init__(self, initial: ArrayRecord) -> None:
        arrays = _read(initial)
        self._dtypes = {name: array.dtype for name, array in arrays.items()}
        self._record: tuple[Model, ArrayRecord] | None = None
        whole = {name for name, dtype in self._dtypes.items() if not _mixes(name, dtype)}
        self.layout = Layout.of(_narrowed(arrays), buffers=whole)

    @property
    def rounded(self) -> list[str]:
        """Names of arrays that have more digits than are mixed."""
        return [name for name, dtype in self._dtypes.items() if dtype.kind == "f" and dtype.itemsize > 4]

    def model(self, record: ArrayRecord) -> Model:
        return self.layout.pack(_narrowed(_read(record)))

    def record(self, model: Model) -> ArrayRecord:
        """The record of a model; asked twice for the same model it is the same record, which is serialised once."""
        if self._record is None or self._record[0] is not model:
            with np.errstate(over="ignore"):  # too large for a float16: the node that trains on it sees infinity
                arrays = {name: model[name].astype(dtype) for name, dtype in self._dtypes.items()}
            record = ArrayRecord({name: FlowerArray(array) for name, array in arrays.items()})
            self._record = (model, record)
        return self._record[1]


def _read(record: ArrayRecord) -> dict[str, Array]:
    try:
        return {name: np.asarray(array.numpy()) for name, array in record.items()}
    except (TypeError, ValueError, OSError, EOFError) as error:
        raise InvalidValue(f"the ArrayRecord holds data that numpy cannot read ({error}); send numpy arrays") from error


def _narrowed(arrays: Mapping[str, Array]) -> dict[str, Array]:
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite, and the update is refused for it
        return {n: a.astype(np.float32) if a.dtype.kind == "f" else a for n, a in arrays.items()}


def _mixes(name: str, dtype: "np.dtype[np.generic]") -> bool:
    if dtype.kind in "iub":
        return False
    if dtype.kind == "f" and dtype.itemsize <= FLOAT_BYTES_MAX:
        return True
    raise InvalidValue(f"{name!r} is {dtype}; a model holds floats of up to 64 bits, whole numbers and booleans")
