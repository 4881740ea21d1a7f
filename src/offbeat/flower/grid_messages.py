"""Owns what travels on Flower's Grid: a lease goes out as a train message; an update, an error or no reply follows.

Rules kept here:
- One message per lease. A reply belongs to the lease of the message that it answers, whatever else it says.
- A reply is taken once. Until it comes, or its message has expired, its node is busy.
- No call waits for a reply: those that have come are pulled.
- Floats of any width are mixed in float32 and go out as they came in: same names, same order, same dtypes.
- Whole numbers and booleans (BatchNorm's counter) do not mix: they follow the newest update.
- A reply that does not fit is refused, and the error names the array. Floats may come in another width.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from offbeat.core.layout import Array, Layout, Model
from offbeat.errors import InvalidValue
from offbeat.protocol.messages import Lease

FLOAT_BYTES_MAX = 8
EXPIRED_AFTER_S = 30.0
"""After its time to live, a message has this long to be reported expired by the SuperLink; then it counts as such."""
REASON_MAX = 300
"""Characters of a node's error that are kept: its last ones, where the exception is."""
AWAY = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)
"""Errors without a fault in the ClientApp: the node is gone, or was too slow."""


# --- models ----------------------------------------------------------------------------------------------------------


class Arrays:
    def __init__(self, initial: ArrayRecord) -> None:
        arrays = _read(initial)
        self._dtypes = {name: array.dtype for name, array in arrays.items()}
        self._record: tuple[Model, ArrayRecord] | None = None
        whole = {name for name, dtype in self._dtypes.items() if not _mixes(name, dtype)}
        self.layout = Layout.of(_narrowed(arrays), buffers=whole)

    @property
    def rounded(self) -> list[str]:
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


# --- messages --------------------------------------------------------------------------------------------------------


class RecordKeys(NamedTuple):
    """The names of a message's records, and of the metric that counts samples."""

    arrays: str
    config: str
    samples: str


class UpdateReply(NamedTuple):
    lease: Lease
    x_new: Model
    samples: int
    metrics: MetricRecord


class NoUpdate(NamedTuple):
    """The node's own error, or an update that does not fit; or the node is away, and there will be no reply."""

    lease: Lease
    why: str
    away: bool = False


class GridMessages:
    def __init__(self, grid: Grid, arrays: Arrays, config: ConfigRecord, keys: RecordKeys, *, ttl_s: float) -> None:
        self.grid, self.arrays, self.keys, self.ttl_s = grid, arrays, keys, ttl_s
        self._config = config
        self._sent: dict[str, Lease] = {}
        """Leases by the message that carries them, as long as a reply may come."""
        self.busy: set[int] = set()
        """Workers whose reply may still come."""

    def send(self, lease: Lease, x_tau: Model, node: int) -> bool:
        """Push a task; False where the Grid did not take it."""
        config = ConfigRecord({**self._config, "server-round": lease.tau + 1})
        content = RecordDict({self.keys.arrays: self.arrays.record(x_tau), self.keys.config: config})
        message = Message(content, node, MessageType.TRAIN, ttl=self.ttl_s, group_id=str(lease.task))
        pushed = list(self.grid.push_messages([message]))
        if not pushed or not pushed[0]:
            return False
        self._sent[str(pushed[0])] = lease
        self.busy.add(lease.worker)
        return True

    def pull(self, at: float) -> Iterator[UpdateReply | NoUpdate]:
        """Replies that have come, then a `NoUpdate` for every message that has expired."""
        if self._sent:
            for message in self.grid.pull_messages(list(self._sent)):
                lease = self._over(message.metadata.reply_to_message_id)
                if lease is not None:
                    yield self._read(lease, message)
        for name, lease in list(self._sent.items()):
            if at > lease.granted_at + self.ttl_s + EXPIRED_AFTER_S:
                self._over(name)
                yield NoUpdate(lease, f"no reply in {self.ttl_s:g} s", away=True)

    def _over(self, name: str) -> Lease | None:
        """The lease of a message that is answered or expired; None where that is known already."""
        lease = self._sent.pop(name, None)
        if lease is not None:
            self.busy.discard(lease.worker)
        return lease

    def _read(self, lease: Lease, message: Message) -> UpdateReply | NoUpdate:
        if message.has_error():
            reason = (message.error.reason or f"error {message.error.code}").strip()[-REASON_MAX:]
            return NoUpdate(lease, reason, away=message.error.code in AWAY)
        try:
            x_new = self.arrays.model(_only(message.content))
            metrics = next(iter(message.content.metric_records.values()), MetricRecord())
            return UpdateReply(lease, x_new, self._samples(metrics), metrics)
        except InvalidValue as error:
            return NoUpdate(lease, str(error))

    def _samples(self, metrics: MetricRecord) -> int:
        """The number of samples that the node reports; 1 where it reports none."""
        samples = metrics.get(self.keys.samples, 1)
        if isinstance(samples, list) or not math.isfinite(samples) or samples < 1:
            raise InvalidValue(f"{self.keys.samples!r} is {samples!r} but must be one number >= 1")
        return int(samples)


def _only(content: RecordDict) -> ArrayRecord:
    records = list(content.array_records.values())
    if len(records) != 1:
        raise InvalidValue(f"the reply holds {len(records)} ArrayRecords; it must hold one, the trained model")
    return records[0]
