"""Owns comparisons: everything is checked, what has not been run is run over all cores, and the runs are summed up.

Rules kept here:
- Every run has its folder, so an interrupted comparison goes on where it was, and finished runs are not run again.
- What is wrong for all runs of a method is found before the first begins, and before anything is written.
- Runs that fail do not keep the others from finishing; which failed, and why, is said at the end.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offbeat.errors import InvalidValue, OffbeatError
from offbeat.hosting.loading import described, identity
from offbeat.sim.backends import HERE, Backend
from offbeat.sim.choose import ANYWHERE
from offbeat.sim.comparison import Comparison, Row, refuse_unknown_metric
from offbeat.sim.lending import Executors
from offbeat.sim.lockstep import Failure, draw, run_share
from offbeat.sim.run import Simulation
from offbeat.sim.spec import ComparedRun, Spec
from offbeat.storage.json_file import plain
from offbeat.storage.lock import Lock
from offbeat.storage.run_folder import LOCK, SETTINGS, SUMMARY, RunFolder

__all__ = ["Comparison", "Row", "Spec", "compare", "run_share"]

NAMED_MAX = 3
"""Reasons that the error gives, and runs that it names for each."""


def compare(
    spec: Spec | Path | str,
    folder: Path | str,
    *,
    processes: int | None = None,
    on: str = HERE,
    ray_address: str | None = None,
    pictures: bool = True,
    on_progress: Callable[[float, int], None] = lambda *_: None,
) -> Comparison:
    """Run what has not been run, over all cores, and sum it up; `spec` may be the path of its file.

    `on` is here or ray, for the cluster at `ray_address`. `pictures` draws every run. Progress is told in runs done, of
    all runs; `on_progress` may raise `StopRequested`.
    """
    spec, folder = Spec.of(spec), Path(folder)
    entries = spec.entries(folder)
    if (folder / SETTINGS).exists():
        raise InvalidValue(f"{folder} is the folder of a run; choose another --dir for the comparison")
    task = identity(spec.task)
    waiting = [entry for entry in entries if not _is_done(entry, task)]
    done = len(entries) - len(waiting)
    place = Backend(on, processes, ray_address)
    place.check(entries)
    on_progress(done, len(entries))
    if waiting:
        check(spec, waiting)
        with _writing(folder):
            failures = place.run(
                spec.task, waiting, lambda far: on_progress(done + far, len(entries)), pictures=pictures
            )
        _refuse_failed(failures, len(entries))
    if pictures:
        for entry in entries:
            draw(entry.folder)
    on_progress(len(entries), len(entries))
    return Comparison.read(spec, folder)


def check(spec: Spec, entries: Sequence[ComparedRun]) -> None:
    """Build one run of every method, without a folder: what is wrong with it is said in one line."""
    executors = Executors(spec.task)
    try:
        for entry in _one_of_each(entries):
            try:
                executor = executors.lend(entry.settings)
                measured = Simulation(executor.task, entry.settings, executor).metrics_0
            except Exception as error:
                raise InvalidValue(f"method {entry.method!r}: {described(error, spec.task)}") from error
            refuse_unknown_metric(spec, entry.method, measured)
    finally:
        executors.close()


def _one_of_each(entries: Sequence[ComparedRun]) -> Iterator[ComparedRun]:
    """The first run of every method."""
    for method in dict.fromkeys(entry.method for entry in entries):
        yield next(entry for entry in entries if entry.method == method)


def _is_done(entry: ComparedRun, task: str) -> bool:
    """Finished, and with these settings; with others the folder must not be used."""
    if not (entry.folder / SETTINGS).exists():
        return False
    there = RunFolder.open(entry.folder).settings
    if there.get("task") != task:
        raise InvalidValue(f"{entry.folder} holds a run of task {there.get('task')}, not {task}; choose another --dir")
    for name, value in plain(entry.settings.as_dict()).items():
        if not _filled_in(name, value, entry) and there.get(name) != value:
            raise InvalidValue(
                f"{entry.folder} holds a run with {name} = {there.get(name)!r}, not {value!r}; choose another --dir"
            )
    return (entry.folder / SUMMARY).exists()


def _filled_in(name: str, value: object, entry: ComparedRun) -> bool:
    """Does a run write down something else than it was told? Which executor it was makes no other run of it."""
    return name in ("executor", *ANYWHERE) or (name == "devices" and (value is None or entry.settings.rule == "sgd"))


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Make the folder; one comparison at a time writes it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = Lock.take(folder / LOCK)
    except OSError as error:
        raise OffbeatError(f"cannot write to {folder}: {error.strerror}; choose another folder with --dir") from error
    try:
        yield
    finally:
        lock.release()


def _refuse_failed(failures: Sequence[Failure], count: int) -> None:
    if not failures:
        return
    reasons: dict[str, list[str]] = {}
    for failure in failures:
        reasons.setdefault(failure.message, []).append(f"{failure.method} (seed {failure.seed})")
    told = [f"{_some(runs, ', ')}: {reason}" for reason, runs in reasons.items()]
    raise OffbeatError(
        f"{len(failures)} of {count} runs failed: {_some(told, '; ')}. "
        "The finished ones are kept; the same command takes up what is missing"
    )


def _some(what: Sequence[str], between: str) -> str:
    more = f" and {len(what) - NAMED_MAX} more" if len(what) > NAMED_MAX else ""
    return between.join(what[:NAMED_MAX]) + more
