"""Owns who holds which samples: every sample of a data set goes to exactly one device.

Rules kept here:
- A partition is a list of index arrays, one per device, each ascending: none is empty, no sample is lost or doubled.
- How many samples a device holds (`sizes`) and which ones (`scheme`) are independent; every combination works.
- The same seed gives the same partition. Too many devices or an unknown scheme are refused with what is allowed.
"""

import math

import numpy as np
import numpy.typing as npt

from offbeat.errors import InvalidValue

Indices = npt.NDArray[np.intp]
Counts = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

FITTING_STEPS_MAX = 500
FITTED_WITHIN = 0.01
"""Samples by which a fitted table may miss a label's count; rounding makes up for it."""
SHARE_MIN = 1e-9
"""A label share of exactly 0 could never be fitted."""
ROUNDING = 1e-9

SCHEMES = "iid, shards:S (S >= 1 pieces per device), dirichlet:A (A > 0), or partition_by(keys) for one device per key"
SIZES = "None (all alike), linear:R (R >= 1, up to R times the smallest) or lognormal:S (S >= 0)"


def partition(
    labels: npt.ArrayLike, devices: int, scheme: str = "iid", *, seed: int = 0, sizes: str | None = None
) -> list[Indices]:
    """Deal out samples to devices; `labels` holds one label per sample.

    `iid` deals at random; `shards:S` sorts by label, cuts, and gives every device S pieces; `dirichlet:A` draws every
    device's label shares from a Dirichlet distribution: the smaller A, the more one-sided.
    Devices get equally many samples, give or take one, unless `sizes` is `linear:R` or `lognormal:S`.

    >>> [part.tolist() for part in partition([7, 8, 7, 8], 2, "shards:1")]
    [[1, 3], [0, 2]]
    >>> [len(part) for part in partition([7] * 60, 3, sizes="linear:3")]
    [10, 20, 30]
    """
    classes, counts = _classes("labels", labels)
    name, number = _scheme(scheme)
    pieces = int(number) if name == "shards" else 1
    _refuse_too_many(devices, len(classes), pieces)
    if seed < 0:
        raise InvalidValue(f"seed is {seed} but must be a whole number >= 0")
    rng = np.random.default_rng(seed)
    wanted = _sizes(sizes, len(classes), devices, rng)
    mixed = rng.permutation(len(classes))
    by_label = mixed[np.argsort(classes[mixed], kind="stable")]
    if name == "shards":
        return _dealt(by_label, *_shards(wanted, pieces, rng))
    if name == "dirichlet":
        return _dealt(by_label, *_skewed(counts, wanted, number, rng))
    return _dealt(mixed, np.arange(devices), wanted)


def partition_by(keys: npt.ArrayLike) -> list[Indices]:
    """One device per distinct key, such as the writer of each sample; devices are in the order of their keys.

    >>> [part.tolist() for part in partition_by(["bob", "ann", "bob"])]
    [[1], [0, 2]]
    """
    classes, counts = _classes("keys", keys)
    return _dealt(np.argsort(classes, kind="stable"), np.arange(len(counts)), counts)


# --- which ones ------------------------------------------------------------------------------------------------------


def _dealt(order: Indices, owners: Indices, lengths: Counts) -> list[Indices]:
    """Cut an order of samples into pieces of these lengths, and give each piece to its owner."""
    owner = np.empty(len(order), np.intp)
    owner[order] = np.repeat(owners, lengths)
    return np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])


def _shards(sizes: Counts, pieces: int, rng: np.random.Generator) -> tuple[Indices, Counts]:
    """Cut the samples of every device into `pieces` pieces, and put all pieces in a random order."""
    owners, which = np.divmod(rng.permutation(len(sizes) * pieces), pieces)
    return owners, sizes[owners] // pieces + (which < sizes[owners] % pieces)


def _skewed(counts: Counts, sizes: Counts, a: float, rng: np.random.Generator) -> tuple[Indices, Counts]:
    """For one label after the other, how many of its samples each device holds."""
    shares = rng.dirichlet(np.full(len(counts), a), len(sizes)) + SHARE_MIN
    table = _whole(_fitted(shares, counts, sizes), counts, sizes, rng)
    return np.tile(np.arange(len(sizes)), len(counts)), table.T.ravel()


def _fitted(table: Shares, counts: Counts, sizes: Counts) -> Shares:
    """Scale rows to the sizes of the devices and columns to the counts of the labels, in turn, until both hold."""
    for _ in range(FITTING_STEPS_MAX):
        table = table * (sizes / table.sum(axis=1))[:, None]
        if np.abs(table.sum(axis=0) - counts).max() < FITTED_WITHIN:
            break
        table = table * (counts / table.sum(axis=0))
    table = table * np.minimum(1.0, counts / table.sum(axis=0))
    fitted: Shares = table * np.minimum(1.0, sizes / table.sum(axis=1))[:, None]
    return fitted


def _whole(table: Shares, counts: Counts, sizes: Counts, rng: np.random.Generator) -> Counts:
    """Round down; then give devices that lack samples the samples that are left, at random."""
    whole = np.floor(table + ROUNDING).astype(np.int64)
    lack = np.repeat(np.arange(len(sizes)), sizes - whole.sum(axis=1))
    left = np.repeat(np.arange(len(counts)), counts - whole.sum(axis=0))
    np.add.at(whole, (lack, rng.permutation(left)), 1)
    return whole


# --- how many --------------------------------------------------------------------------------------------------------


def _sizes(spec: str | None, samples: int, devices: int, rng: np.random.Generator) -> Counts:
    if spec is None:
        return samples // devices + (np.arange(devices) < samples % devices)
    name, _, number = spec.partition(":")
    if name == "linear" and _number(number) >= 1:
        weights = np.linspace(1.0, _number(number), devices)
    elif name == "lognormal" and _number(number) >= 0:
        logs = _number(number) * rng.standard_normal(devices)
        weights = np.exp(logs - logs.max())
    else:
        raise InvalidValue(f"sizes {spec!r} is unknown; use {SIZES}")
    return _rounded(weights / weights.sum() * samples, samples)


def _rounded(quotas: Shares, total: int) -> Counts:
    """Whole numbers >= 1 near the quotas that add up to the total: the largest remainders are rounded up."""
    whole = np.maximum(1, np.floor(quotas + ROUNDING)).astype(np.int64)
    missing = total - int(whole.sum())
    if missing > 0:
        whole[np.argsort(whole - quotas, kind="stable")[:missing]] += 1
    for _ in range(-missing):
        whole[np.argmax(whole)] -= 1
    return whole


# --- what is refused -------------------------------------------------------------------------------------------------


def _classes(name: str, values: npt.ArrayLike) -> tuple[Indices, Counts]:
    """For every sample the number of its distinct value, and how often each occurs."""
    array = np.asarray(values)
    if array.ndim != 1 or not array.size:
        raise InvalidValue(f"{name} has shape {array.shape} but must be a list with one entry per sample")
    _, classes, counts = np.unique(array, return_inverse=True, return_counts=True)
    return classes, counts.astype(np.int64)


def _scheme(spec: str) -> tuple[str, float]:
    name, _, number = spec.partition(":")
    value = _number(number)
    whole = name == "shards" and value >= 1 and value == math.floor(value)
    if spec == "iid" or whole or (name == "dirichlet" and value > 0):
        return name, value
    raise InvalidValue(f"partition {spec!r} is unknown; use {SCHEMES}")


def _number(text: str) -> float:
    """A finite number, or NaN, which no comparison lets through."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _refuse_too_many(devices: int, samples: int, pieces: int) -> None:
    most = samples // pieces
    if most < 1:
        raise InvalidValue(
            f"{samples} samples cannot be cut into {pieces} pieces per device; use shards:{samples} at most"
        )
    if not 1 <= devices <= most:
        each = "a sample" if pieces == 1 else f"{pieces} pieces"
        raise InvalidValue(f"devices is {devices} but must lie in 1..{most}: {samples} samples, {each} for each device")
