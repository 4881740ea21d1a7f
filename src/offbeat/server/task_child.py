"""Owns the process that has the user's task in it: one JSON object per line asks, one answers.

    {"do": "load", "task": "digits", "settings": {...}}     {"about": {...}, "layout": {...}}
    {"do": "initial", "seed": 0, "out": PATH}               {"layout": {...}}, and x_0 is in that file
    {"do": "evaluate", "t": 12, "file": PATH}               {"t": 12, "metrics": {"loss": 0.3}}
    anything that goes wrong                                {"error": "one line: what, and where"}

Rules kept here:
- Requests and answers have descriptors of their own: a task may print, or read its standard input, as it likes.
- What goes wrong in a task, or is wrong with a request, is an answer; the process lives on.
- It ends when nobody is left to ask, at once and in the middle of whatever it does, and for no Ctrl-C.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, NoReturn

import numpy as np

from offbeat.core.layout import Layout, Model, layout_from, layout_to
from offbeat.errors import InvalidValue, OffbeatError
from offbeat.loading import identity, load
from offbeat.settings import Settings
from offbeat.storage.aside import aside
from offbeat.task import Task, evaluate, start
from offbeat.wire import body_of, header_of, unpack

NICE = 5
"""So much does mixing go first."""
SHOWN_MAX = 1000
"""Characters of an error that are passed on."""


class Host:
    """The task, once it is loaded, and what can be asked of it."""

    def __init__(self) -> None:
        self.spec = ""
        self._task: Task | None = None
        self._layout: Layout | None = None
        self._x_0: tuple[int, Model] | None = None
        """Made when the task was loaded, for whoever asks for it next: a warm-up may have taken long."""

    def answer(self, line: bytes) -> dict[str, Any]:
        """What came of one request."""
        verb = "what it was asked"
        try:
            request = _parsed(line)
            verb = request["do"]
            answer: dict[str, Any] = getattr(self, f"_{verb}")(request)
        except (Exception, SystemExit) as error:  # a task may do anything, and this process goes on
            if not isinstance(error, OffbeatError):
                traceback.print_exc()
            return {"error": _described(error, verb, self.spec)}
        return answer

    def _load(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Load the task; whoever knows its layout from before need not wait for x_0 and its metrics."""
        self._task = self._layout = self._x_0 = None
        self.spec, settings = _text(request, "task"), Settings.of(request.get("settings", {}))
        sys.path += [path for path in request.get("path", ()) if path not in sys.path]
        task = load(self.spec, settings)
        metrics: list[str] = []
        if "layout" in request:
            self._layout = layout_from(request["layout"])
        else:
            x_0 = start(task, settings.seed)
            self._layout, self._x_0 = x_0.layout, (settings.seed, x_0)
            metrics = list(evaluate(task, x_0.copy()))
        self._task = task
        return {"about": about(task, metrics), "layout": layout_to(self._layout)}

    def _initial(self, request: Mapping[str, Any]) -> dict[str, Any]:
        task, _ = self._loaded()
        seed, out = _whole(request, "seed"), Path(_text(request, "out"))
        made, self._x_0 = self._x_0, None
        x_0 = made[1] if made is not None and made[0] == seed else start(task, seed)
        self._layout = x_0.layout
        with aside(out) as temporary, temporary.open("wb") as file:
            file.write(header_of(x_0.layout))
            file.writelines(body_of(x_0))
        return {"layout": layout_to(x_0.layout)}

    def _evaluate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        task, layout = self._loaded()
        t, file = _whole(request, "t"), Path(_text(request, "file"))
        self._x_0 = None  # a run that goes on does not ask for it
        try:
            model = unpack(np.memmap(file, np.uint8, mode="r").data, layout)
        except (OSError, ValueError) as error:
            raise InvalidValue(f"{file} is no model of this task: {error}") from error
        return {"t": t, "metrics": evaluate(task, model)}

    def _loaded(self) -> tuple[Task, Layout]:
        if self._task is None or self._layout is None:
            raise InvalidValue("no task is loaded; send a request to load one first")
        return self._task, self._layout


VERBS = ("load", "initial", "evaluate")


def about(task: Task, metrics: list[str]) -> dict[str, Any]:
    """What a server wants to know of a task."""
    policy = getattr(task, "batch_norm", None)
    policy = policy if isinstance(policy, str) else None
    return {
        "identity": identity(task),
        "devices": _number(task, "devices", int),
        "made_for": _number(task, "made_for", int),
        "gamma": _number(task, "gamma", float),
        "batch_norm": policy,
        "refreshes": hasattr(task, "refresh") and policy in (None, "newest"),
        "metrics": metrics,
    }


def _number(task: Task, name: str, kind: type[int] | type[float]) -> float | None:
    """As Python's own number: numpy's are no JSON."""
    value = getattr(task, name, None)
    return None if value is None else kind(value)


# --- requests --------------------------------------------------------------------------------------------------------


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except ValueError as error:
        raise InvalidValue(f"the request is no JSON: {error}; send one object per line") from None
    if not isinstance(request, dict) or request.get("do") not in VERBS:
        raise InvalidValue(f"the request must be an object in which `do` is one of {', '.join(VERBS)}")
    return request


def _text(request: Mapping[str, Any], name: str) -> str:
    value = request.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"a request to {request['do']} needs `{name}`, a text, not {value!r}")
    return value


def _whole(request: Mapping[str, Any], name: str) -> int:
    value = request.get(name)
    if not isinstance(value, int) or value < 0:
        raise InvalidValue(f"a request to {request['do']} needs `{name}`, a whole number >= 0, not {value!r}")
    return value


def _described(error: BaseException, verb: str, spec: str) -> str:
    """An error in one line; where the task's own file is to blame, with the place in it."""
    text = " ".join(str(error).split())
    shown = text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "..."
    file = Path(spec.partition(":")[0]).resolve()
    frames = [*traceback.extract_tb(error.__traceback__)]
    if error.__cause__ is not None:  # it is where things went wrong first
        frames += traceback.extract_tb(error.__cause__.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve() == file]
    if isinstance(error, OffbeatError):
        return f"{shown} ({file.name}:{own[-1].lineno})" if own else shown
    place = (own or frames)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    return f"task {spec} fails to {verb}: {type(error).__name__}: {shown} ({where})"


# --- the process -----------------------------------------------------------------------------------------------------


def channel() -> tuple[BinaryIO, BinaryIO]:
    """Where requests come from and answers go to; the standard descriptors are the task's, and lead elsewhere."""
    requests, answers = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    return os.fdopen(requests, "rb"), os.fdopen(answers, "wb")


def _listen(requests: BinaryIO, waiting: "SimpleQueue[bytes]") -> None:
    for line in requests:
        waiting.put(line)
    os._exit(0)  # a task that is in the middle of something would not hear of anything milder


def main() -> NoReturn:
    """Answer until nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its child in order
    requests, answers = channel()
    os.nice(NICE)
    waiting: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(requests, waiting), name="requests", daemon=True).start()
    host = Host()
    while True:
        answer = json.dumps(host.answer(waiting.get())).encode() + b"\n"
        with suppress(BrokenPipeError):  # nobody is left; the other thread is about to see it
            answers.write(answer)
            answers.flush()


if __name__ == "__main__":
    main()
