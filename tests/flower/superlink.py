"""A real SuperLink and real SuperNodes on this machine, each in a process group of its own, all ended by their ids."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

PATIENCE_S = 600.0
"""For anything; it takes a tenth of that, unless the machine is busy."""
END_S = 20.0
BIN = Path(sys.executable).parent


class SuperLink:
    """A SuperLink, and the SuperNodes that were started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.nodes: list[subprocess.Popen[bytes]] = []
        home = folder / "home"
        home.mkdir(parents=True)
        address = f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "here"\n\n[superlink.here]\n{address}')
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        self.env = {**os.environ, **quiet, "FLWR_HOME": str(home), "PATH": path, "PYTHONWARNINGS": "ignore"}

    def __enter__(self) -> Self:
        where = ("--insecure", "--host", "127.0.0.1", "--port", str(self.port))
        self.link = self._start("flower-superlink", *where, "--disable-runtime-dependency-installation")
        return self

    def node(self, **config: Any) -> subprocess.Popen[bytes]:
        """One more SuperNode; it connects when it can."""
        text = " ".join(f"{name.replace('_', '-')}={value}" for name, value in config.items())
        here = ("--host", "127.0.0.1", "--port", str(free_port()))
        to = ("--insecure", "--superlink", f"127.0.0.1:{self.port}")
        self.nodes.append(self._start("flower-supernode", *to, *here, "--node-config", text))
        return self.nodes[-1]

    def run(self, app: Path, **config: Any) -> None:
        """Start a run of an app, once the SuperLink is there."""
        until(self._is_up, "the SuperLink is up")
        text = " ".join(f"{name.replace('_', '-')}={json.dumps(value)}" for name, value in config.items())
        command = [str(BIN / "flwr"), "run", str(app), "here", "--run-config", text]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        if done.returncode:
            raise AssertionError(done.stdout + done.stderr + self.logs())

    def logs(self) -> str:
        """What all of them have said, its end."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def _is_up(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _start(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        count = len(list(self.folder.glob("*.log")))
        with (self.folder / f"{count}-{program}.log").open("wb") as log:
            return subprocess.Popen(
                *([str(BIN / program), *arguments],),
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        started = (*self.nodes, self.link)
        descendants = [child for process in started for child in family(process)]
        for process in started:
            end(process, signal.SIGTERM)
        _, left = psutil.wait_procs(descendants, END_S)
        for child in left:  # some have a session of their own, and do not hear what their parents hear
            with suppress(psutil.NoSuchProcess):
                child.kill()
        for process in started:
            end(process, signal.SIGKILL)
            process.wait(END_S)


def family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """All that a process has started, and they in turn; whoever is dead has none."""
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(process.pid).children(recursive=True))
    return []


def end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process that we started, and to all that it has started."""
    with suppress(ProcessLookupError):  # all of them are gone
        os.killpg(process.pid, number)


def free_port() -> int:
    """A port that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(holds: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Look again and again; an error where it does not come about in time."""
    deadline, never = time.monotonic() + patience_s, threading.Event()
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"it did not come about in {patience_s:g} s that {what}")
        never.wait(0.1)
