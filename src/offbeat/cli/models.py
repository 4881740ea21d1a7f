"""Owns models in files of the user's: from a server or a folder, as safetensors or as a torch state_dict."""

from collections.abc import Mapping
from pathlib import Path

from offbeat.cli.remote import download_model, is_url
from offbeat.core.layout import Array, Model
from offbeat.errors import InvalidValue, MissingExtra, OffbeatError
from offbeat.storage.disk import Bytes, Disk
from offbeat.storage.run_folder import AVERAGE, BEST, FINAL, NEWEST, RunFolder
from offbeat.wire import body_of, header_of

Found = bytes | Model | Mapping[str, Array]
"""A model: its safetensors file, or its arrays."""


def export_model(
    source: str, out: Path, epoch: str, form: str, token: str | None, ca: Path | None, *, average: bool = False
) -> str:
    """Write a version (its epoch, or latest, result or best) to a file; answers its epoch.

    `average` where it is the averaged model up to that version.
    """
    found: Found
    if average and is_url(source):
        t, found = _average_of_server(source, epoch, token, ca)
    elif is_url(source):
        t, found = download_model(source, epoch, token, ca)
    else:
        t, found = _average_of_folder(Path(source), epoch) if average else _of_folder(Path(source), epoch)
    if form == "torch":
        _write_torch(out, found)
        return t
    try:
        Disk().write_whole(out, _parts(found, t))
    except OSError as error:
        raise OffbeatError(f"cannot write {out}: {error.strerror}") from error
    return t


def _of_folder(folder: Path, epoch: str) -> tuple[str, Found]:
    run = RunFolder.open(folder)
    summary, served = run.summary or {}, (folder / "layout.json").is_file()
    newest = summary.get("t")
    t = summary.get("result_t", newest)
    if epoch == "best":
        return _of_file(folder / BEST, None, f"{folder} holds no best version: {_why_no_best(run)}")
    if epoch == "result" and summary and (folder / FINAL).is_file():
        return _of_file(folder / FINAL, t, "")
    if served:
        from offbeat.server.replay import model_at

        reached, model = model_at(folder, "latest" if epoch == "result" else epoch)
        return str(reached), model
    _refuse_unfinished(run)
    if epoch not in ("latest", str(newest), str(t)):
        raise InvalidValue(f"{folder} holds only the final model, version {t}, of a finished run: use --epoch latest")
    return _of_file(folder / (FINAL if epoch == str(t) or t == newest else NEWEST), newest, "")


def _average_of_server(url: str, epoch: str, token: str | None, ca: Path | None) -> tuple[str, Found]:
    if epoch != "result":
        raise InvalidValue(
            f"a server gives out its newest averaged model and no other: leave out --epoch {epoch}, or export from the "
            "run's folder"
        )
    return download_model(url, "average", token, ca)


def _average_of_folder(folder: Path, epoch: str) -> tuple[str, Found]:
    """What a finished run wrote; before its end, and for other epochs, what the updates of a served run give."""
    from offbeat.server.replay import NO_AVERAGE, model_at

    run, served = RunFolder.open(folder), (folder / "layout.json").is_file()
    if (run.settings.get("average") or "none") == "none":
        raise InvalidValue(NO_AVERAGE.format(folder))
    summary = run.summary or {}
    if summary and epoch in ("result", *(() if served else ("latest",)), str(summary.get("average_t"))):
        return _of_file(folder / AVERAGE, summary.get("average_t"), "")
    if not served:
        _refuse_unfinished(run)
        raise InvalidValue(f"{folder} holds only the averaged model of a finished run: leave out --epoch {epoch}")
    reached, model = model_at(folder, "latest" if epoch == "result" else epoch, average=True)
    return str(reached), model


def _refuse_unfinished(run: RunFolder) -> None:
    if run.summary is None:
        raise InvalidValue(
            f"the run in {run.path} is {run.state}, and a simulated run has no model before it is finished; "
            + ("wait for its end" if run.state == "running" else "the command that began it goes on with it")
        )


def _of_file(file: Path, t: int | None, otherwise: str) -> tuple[str, Found]:
    """A model that the run wrote itself; `otherwise` is said where it did not."""
    from safetensors import safe_open

    if not file.is_file():
        raise InvalidValue(otherwise or f"{file} is missing; restore it from a copy")
    with safe_open(file, framework="np") as opened:
        metadata = opened.metadata() or {}
        arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no dict)
    return metadata.get("t", "?" if t is None else str(t)), arrays


def _why_no_best(run: RunFolder) -> str:
    if not run.settings.get("keep_best"):
        return "it was not run with --keep-best METRIC"
    if run.settings.get("served"):
        return "no version has been evaluated yet"
    return f"it is {run.state}, and a simulated run has none before it is finished"


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
