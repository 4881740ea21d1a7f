"""Owns models on disk: safetensors files, each array under its own name.

Rules kept here:
- Any safetensors reader can read them. Tied arrays are stored once; the metadata say which names share them.
- Bits are kept: NaN payloads and the sign of zero read back as they were written.
- A file is written whole or not at all, and one that does not fit the model is refused by the name of what does not.
- The digest of all arrays and metadata is in the metadata: a damaged file is refused. One of before has none.
- A checkpoint may hold the states of devices beside the models: arrays of any shape and dtype, each as `state/array`.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from offbeat.core.layout import Array, Layout, Model
from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.storage.disk import aside
from offbeat.task import DeviceState

DIGEST = "sha256"
RESERVED = "__metadata__"
"""The one name that safetensors keeps for itself."""
MODELS, STATES = "models", "states"
"""The metadata that name the models in a file, and the states with their numbers."""
NO_STATES: Mapping[str, DeviceState] = {}

Metadata = dict[str, str]


def save_model(path: Path, model: Model, metadata: Mapping[str, str]) -> None:
    """Write one model; `layout` and `tied` are added to its metadata."""
    _save(path, _arrays(model), {**metadata, **_facts(model.layout)})


def load_model(path: Path, layout: Layout) -> tuple[Model, Metadata]:
    """A model of this layout, and the metadata that were written with it."""
    arrays, metadata = _load(path)
    return _packed(path, layout, arrays), metadata


def save_models(
    path: Path, models: Mapping[str, Model], metadata: Mapping[str, str], states: Mapping[str, DeviceState] = NO_STATES
) -> None:
    """Write several models of one layout into one file: each array as `model/array`, for checkpoints."""
    if both := models.keys() & states.keys():
        raise InvalidValue(f"a model and a state are both called {min(both)!r}; rename one of them")
    arrays = _grouped("model", {name: _arrays(model) for name, model in models.items()}) | _grouped("state", states)
    layouts = {model.layout.fingerprint: model.layout for model in models.values()}
    if len(layouts) != 1:
        raise InvalidValue(
            f"models of {len(layouts)} layouts cannot share {path}; save at least one, all of one layout"
        )
    (layout,) = layouts.values()
    facts = {**_facts(layout), MODELS: json.dumps(list(models)), **_numbers(states)}
    _save(path, arrays, {**metadata, **facts})


def load_models(path: Path, layout: Layout) -> tuple[dict[str, Model], Metadata]:
    """The models of this layout that `save_models` wrote, by name and in the order in which they were given."""
    arrays, metadata = _load(path)
    groups, states = _by_name(path, arrays, metadata), _states_named(metadata)
    return {name: _packed(path, layout, inner) for name, inner in groups.items() if name not in states}, metadata


def states_file(states: Mapping[str, DeviceState]) -> bytes:
    """The contents of a file that holds the states of devices alone."""
    return _content(_grouped("state", states), {MODELS: "[]", **_numbers(states)})


def load_states(path: Path) -> dict[str, DeviceState]:
    """The states in a file that `save_models` wrote, or that holds `states_file`; none where it has none."""
    if STATES not in metadata_of(path):
        return {}
    arrays, metadata = _load(path)
    groups, numbers = _by_name(path, arrays, metadata), _states_named(metadata)
    return {name: DeviceState(groups[name], number) for name, number in numbers.items()}


def metadata_of(path: Path) -> Metadata:
    """The metadata alone; the arrays are not read."""
    try:
        with safe_open(path, framework="np") as file:
            return dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise InvalidValue(f"{path} is damaged or not a safetensors file ({error}); restore it from a copy") from error


def refuse_damaged(path: Path) -> None:
    """Read a file that was written here, and refuse it where it is not what was written."""
    _load(path)


def _grouped(kind: str, groups: Mapping[str, Mapping[str, Array]]) -> dict[str, Array]:
    arrays: dict[str, Array] = {}
    for name, inner in groups.items():
        if not name or "/" in name:
            raise InvalidValue(f"a {kind} is called {name!r} but its name must not be empty nor hold a '/'")
        arrays |= {f"{name}/{own}": array for own, array in inner.items()}
    return arrays


def _numbers(states: Mapping[str, DeviceState]) -> Metadata:
    return {STATES: json.dumps({name: state.number for name, state in states.items()})} if states else {}


def _states_named(metadata: Metadata) -> dict[str, int]:
    named: dict[str, int] = json.loads(metadata.get(STATES, "{}"))
    return named


def _by_name(path: Path, arrays: dict[str, Array], metadata: Metadata) -> dict[str, dict[str, Array]]:
    """The arrays of every model and state."""
    try:
        names = [*json.loads(metadata[MODELS]), *_states_named(metadata)]
        groups: dict[str, dict[str, Array]] = {name: {} for name in names}
        for full, array in arrays.items():
            name, _, inner = full.partition("/")
            groups[name][inner] = array
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(
            f"{path} does not hold several models, as a checkpoint does; load it as one model"
        ) from error
    return groups


def _arrays(model: Model) -> dict[str, Array]:
    """What is stored: every slice of the vector once, and what is carried."""
    names = (*(slot.name for slot in model.layout.slots), *model.carried)
    return {name: np.asarray(model[name], order="C") for name in names}


def _facts(layout: Layout) -> Metadata:
    return {"layout": layout.fingerprint, "tied": json.dumps(dict(layout.tied))}


def _save(path: Path, arrays: dict[str, Array], metadata: Metadata) -> None:
    if RESERVED in arrays:
        raise InvalidValue(f"an array is called {RESERVED!r}, a name that safetensors keeps for itself; rename it")
    try:
        content = _content(arrays, metadata)
    except (SafetensorError, TypeError, ValueError) as error:
        raise InvalidValue(
            f"cannot write {path}: {error}; arrays must hold numbers or booleans, names and metadata must be text"
        ) from error
    with aside(path) as temporary:
        temporary.write_bytes(content)


def _content(arrays: dict[str, Array], metadata: Metadata) -> bytes:
    return save(arrays, {**metadata, DIGEST: _digest(arrays, metadata)})


def _digest(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(dict(metadata), sort_keys=True).encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _load(path: Path) -> tuple[dict[str, Array], Metadata]:
    try:
        with safe_open(path, framework="np") as file:
            arrays, metadata = {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118 (no dict)
    except FileNotFoundError:
        raise InvalidValue(f"there is no model file {path}; a run writes it when it ends") from None
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise InvalidValue(
            f"{path} is damaged or not a safetensors file ({error}); restore it from a copy, or run again"
        ) from error
    wanted = metadata.pop(DIGEST, None)
    if wanted is not None and wanted != _digest(arrays, metadata):
        raise InvalidValue(f"{path} is damaged: it does not hold what was written; restore it from a copy")
    return arrays, metadata


def _packed(path: Path, layout: Layout, arrays: Mapping[str, Array]) -> Model:
    try:
        return layout.pack(arrays)
    except LayoutMismatch as error:
        raise LayoutMismatch(f"{path} does not fit this model: {error}") from error
