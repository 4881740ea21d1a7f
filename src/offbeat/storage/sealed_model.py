"""Owns models on disk whose file says whether it is whole: the digest of the rest is in its metadata.

Rules kept here:
- Any safetensors reader can read them, and the body is the flat vector: they can be mapped.
- A damaged one is refused. One without a digest, of an earlier version, is taken as it is.
"""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from offbeat.core.layout import Layout, Model
from offbeat.storage.disk import Bytes
from offbeat.wire import BadPayload, body_of, header_of, mapped_with_metadata

DIGEST = "sha256"


def sealed_parts(model: Model, metadata: Mapping[str, str]) -> list[Bytes]:
    """The bytes of a model's file."""
    digest = _digest([header_of(model.layout, metadata), *body_of(model)])
    return [header_of(model.layout, {**metadata, DIGEST: digest}), *body_of(model)]


def mapped_whole(path: Path, layout: Layout) -> Model:
    """The model in a file, as `mapped` gives it; refused where it is not what was written."""
    model, said = mapped_with_metadata(path, layout)
    wanted = said.get(DIGEST)
    metadata = {name: value for name, value in said.items() if name not in (DIGEST, "layout")}
    if wanted is not None and _digest([header_of(layout, metadata), *body_of(model)]) != wanted:
        raise BadPayload(f"{path} does not hold what was written")
    return model


def _digest(parts: Iterable[Bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
