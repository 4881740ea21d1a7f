"""Owns which files of a run are not what was written, as far as the files themselves and their summary say.

Rules kept here:
- It only reads. Files that hold no digest, of earlier versions, are not complained about.
- Updates are not looked at here: their digests are in the ledger, and a replay compares them.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offbeat.core.layout import Layout, layout_from
from offbeat.digests import digest_of_file
from offbeat.errors import InvalidValue
from offbeat.storage.checkpoints import damaged_checkpoints
from offbeat.storage.json_file import read_json
from offbeat.storage.model_file import refuse_damaged
from offbeat.storage.run_folder import BEST, CHECKPOINT, FINAL, SETTINGS, SUMMARY, X_0
from offbeat.storage.sealed_model import mapped_whole

FACTS = (SETTINGS, SUMMARY, "run.json", "layout.json", "server.json")


def damaged_files(folder: Path) -> Iterator[str]:
    """A sentence for every file that is not what was written."""
    facts: dict[str, Mapping[str, Any]] = {}
    for name in FACTS:
        if (folder / name).is_file():
            try:
                facts[name] = read_json(folder / name)
            except InvalidValue as error:
                yield str(error)
    yield from _unlike(folder, facts)
    yield from damaged_checkpoints(folder / "checkpoints")
    try:
        layout = layout_from(facts["layout.json"]) if "layout.json" in facts else None
    except InvalidValue as error:
        yield f"{folder / 'layout.json'}: {error}"
        return
    if layout is not None:
        yield from _damaged_models(folder, layout)
    elif (folder / CHECKPOINT).is_file():
        yield from _refused(refuse_damaged, folder / CHECKPOINT)


def _unlike(folder: Path, facts: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Files whose digests other files hold."""
    summary, run = facts.get(SUMMARY, {}), facts.get("run.json", {})
    known = {FINAL: summary.get("file_sha256"), X_0: run.get("x_0_sha256"), **summary.get("files_sha256", {})}
    for name, digest in known.items():
        if digest is None:
            continue
        if not (folder / name).is_file():
            yield f"{folder / name} is missing; restore it from a copy"
        elif digest_of_file(folder / name) != digest:
            yield f"{folder / name} is not the file that the run wrote; restore it from a copy"


def _damaged_models(folder: Path, layout: Layout) -> Iterator[str]:
    """Of a served run."""
    models = [*sorted(folder.glob("versions/*.safetensors")), *sorted(folder.glob("kept/*.safetensors"))]
    models += [folder / BEST] if (folder / BEST).is_file() else []
    for file in models:
        yield from _refused(lambda path: mapped_whole(path, layout), file)


def _refused(read: Callable[[Path], object], path: Path) -> Iterator[str]:
    try:
        read(path)
    except FileNotFoundError:  # of a run that is being served: it was removed just now
        return
    except (OSError, InvalidValue) as error:
        if path.exists():
            yield str(error) if str(path) in str(error) else f"{path}: {error}"
