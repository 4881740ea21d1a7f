"""Owns models in files of the user's: from a server or a folder, as safetensors or as a torch state_dict."""

from collections.abc import Mapping
from pathlib import Path

from offbeat.cli.remote import download_model, is_url
from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.storage.disk import Bytes, Disk
from offbeat.storage.run_folder import RunFolder
from offbeat.wire import body_of, header_of

Found = bytes | Model | Mapping[str, Array]
"""A model: its safetensors file, or its arrays."""


def export_model(source: str, out: Path, epoch: str, form: str, token: str | None, ca: Path | None) -> str:
    found: Found
    t, found = download_model(source, epoch, token, ca) if is_url(source) else _of_folder(Path(source), epoch)
    if form == "torch":
        _write_torch(out, found)
        return t
    try:
        Disk().write_whole(out, _parts(found, t))
    except OSError as error:
        raise OffbeatError(f"cannot write {out}: {error.strerror}") from error
    return t


def _of_folder(folder: Path, epoch: str) -> tuple[str, Found]:
    if (folder / "layout.json").is_file():
        from offbeat.server.replay import model_at

        t, model = model_at(folder, epoch)
        return str(t), model
    if epoch != "latest" or not (folder / "x.safetensors").is_file():
        raise InvalidValue(f"{folder} holds only the final model of a finished run: use --epoch latest")
    from safetensors.numpy import load_file

    summary = RunFolder.open(folder).summary or {}
    return str(summary.get("t", "?")), load_file(folder / "x.safetensors")


def _parts(found: Found, t: str) -> list[Bytes]:
    from safetensors.numpy import save

    if isinstance(found, bytes):
        return [found]
    if isinstance(found, Model):
        return [header_of(found.layout, {"t": t}), *body_of(found)]
    return [save(dict(found), {"t": t})]


def _write_torch(out: Path, found: Found) -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch") from error
    from safetensors.numpy import load

    arrays = load(found) if isinstance(found, bytes) else dict(found)
    try:
        torch.save({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, out)
    except (OSError, RuntimeError) as error:
        raise OffbeatError(f"cannot write {out}: {error}") from error
