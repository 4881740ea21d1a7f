"""Owns models in files of the user's: from a server or a folder, as safetensors or as a torch state_dict."""

from pathlib import Path
from typing import Any

from offbeat.cli.remote import download_model, is_url
from offbeat.core.layout import Model
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.storage.run_folder import RunFolder


def export_model(source: str, out: Path, epoch: str, form: str, token: str | None, ca: Path | None) -> str:
    if is_url(source):
        t, body = download_model(source, epoch, token, ca)
        arrays = None
    else:
        t, model = _of_folder(Path(source), epoch)
        body, arrays = b"", model
    if form == "torch":
        _write_torch(out, body, arrays)
    else:
        _write_safetensors(out, body, arrays, t)
    return str(t)


def _of_folder(folder: Path, epoch: str) -> tuple[str, Any]:
    if (folder / "layout.json").is_file():
        from offbeat.server.verify import model_at

        t, model = model_at(folder, epoch)
        return str(t), model
    if epoch != "latest" or not (folder / "x.safetensors").is_file():
        raise InvalidValue(f"{folder} holds only the final model of a finished run: use --epoch latest")
    from safetensors.numpy import load_file

    summary = RunFolder.open(folder).summary or {}
    return str(summary.get("t", "?")), load_file(folder / "x.safetensors")


def _write_safetensors(out: Path, body: bytes, arrays: Any, t: str) -> None:
    from offbeat.storage.disk import Disk
    from offbeat.wire import body_of, header_of

    try:
        if isinstance(arrays, Model):
            Disk().write_whole(out, [header_of(arrays.layout, {"t": t}), *body_of(arrays)])
        elif arrays is not None:
            from safetensors.numpy import save

            Disk().write_whole(out, [save(arrays, {"t": t})])
        else:
            Disk().write_whole(out, [body])
    except OSError as error:
        raise OffbeatError(f"cannot write {out}: {error.strerror}") from error


def _write_torch(out: Path, body: bytes, arrays: Any) -> None:
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch") from error
    if arrays is None:
        from safetensors.numpy import load

        arrays = load(body)
    state = {name: torch.from_numpy(array.copy()) for name, array in dict(arrays).items()}
    try:
        torch.save(state, out)
    except (OSError, RuntimeError) as error:
        raise OffbeatError(f"cannot write {out}: {error}") from error
