"""Makes the run folders that every later version must open and resume: `python tests/golden/make_runs.py --help`.

Those of 0.1 were made with commit a6a9a6e, by

    git worktree add /elsewhere a6a9a6e
    python tests/golden/make_runs.py /elsewhere runs_of_0_1 --flower .venv-flower/bin/python

A later version adds a folder of its own and leaves the others alone. Rules kept here:
- The version that is recorded does everything: it makes the runs, and says what is expected of them (`expected.json`).
- What a crash leaves is kept: redo logs, open leases, the ledger's `-wal` where it is small, else what it held is
  brought into the ledger. Left out are pictures, which are large; the shared memory of SQLite, which it makes anew; and
  the port of a server that is gone, where somebody else may listen.
- Nothing of the machine that made them is inside: all paths are relative.
"""

import argparse
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORDED = HERE.parent / "flower" / "recorded.py"
TASK, RUN, EXPECTED = "line.py", "run", "expected.json"
WORKERS = 3
CHECKPOINT_EVERY, KILL_AFTER = 5, 12
SERVED = ("--epochs", "24", "--checkpoint-every", str(CHECKPOINT_EVERY), "--evaluate-every", "6", "--seed", "5")
WORLD = {"device_model": "lognormal:1", "dropout": 0.1, "lease_s": 4.0, "evaluate_every": 7}
START_S, END_S, LOOK_S = 60.0, 120.0, 0.01
LEFT_OUT = ("*.png", "*.svg", "*.sqlite-shm", ".lock")
WAL_BYTES_MAX = 64 << 10
NOBODY = "http://127.0.0.1:1"
INTERRUPTED = """
import os, offbeat
calls = 0
def watch(simulation):
    global calls
    calls += 1
    if calls == 25:
        simulation.checkpoint()
    if calls == 33:
        simulation.ledger.flush()
        os._exit(9)
chosen = dict(rule="fedbuff:3", epochs=20, seed=4, executor="inline")
offbeat.simulate("line.py", dir="run", on_progress=watch, **chosen, {world})
"""


class Maker:
    """One version, and a Python that can run it."""

    def __init__(self, checkout: Path, flower: str | None) -> None:
        self.environment = os.environ | {"PYTHONPATH": f"{checkout / 'src'}:{checkout}"}
        self.flower = flower

    def run(self, folder: Path, *arguments: str, python: str = sys.executable, status: int = 0) -> str:
        done = subprocess.run([python, *arguments], cwd=folder, env=self.environment, stdout=subprocess.PIPE, text=True)
        if done.returncode != status:
            raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}")
        return done.stdout

    def start(self, folder: Path, *arguments: str, **environment: str) -> "subprocess.Popen[bytes]":
        with (folder / "log").open("ab") as log:
            command = [sys.executable, "-m", "offbeat", *arguments]
            return subprocess.Popen(command, cwd=folder, env=self.environment | environment, stdout=log, stderr=log)

    # --- simulated ---------------------------------------------------------------------------------------------------

    def simulated_finished(self, folder: Path) -> None:
        """Some tasks are lost, some updates are too stale."""
        world = [part for name, value in WORLD.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        policy = ("--staleness-policy", "reject", "--staleness-max", "1")
        self.run(
            folder, "-m", "offbeat", "simulate", TASK, "--dir", RUN, "--epochs", "30", "--seed", "3", *policy, *world
        )

    def simulated_interrupted(self, folder: Path) -> None:
        """Killed in the middle of a group, some time after its checkpoint."""
        world = ", ".join(f"{name}={value!r}" for name, value in WORLD.items())
        self.run(folder, "-c", INTERRUPTED.replace("{world}", world), status=9)

    # --- served ------------------------------------------------------------------------------------------------------

    def served_delta_finished(self, folder: Path) -> None:
        server, workers = self.fleet(folder, "--rule", "delta", "--exit-when-finished")
        for process in (*workers, server):
            if process.wait(END_S):
                raise SystemExit(f"{folder}: a process failed; see {folder / 'log'}")

    def served_delta_interrupted(self, folder: Path) -> None:
        self.killed(folder, "--rule", "delta", "--norm-max", "10")

    def served_fedasync_interrupted(self, folder: Path) -> None:
        self.killed(folder, "--keep-updates", "all")

    def fleet(self, folder: Path, *options: str) -> tuple["subprocess.Popen[bytes]", list["subprocess.Popen[bytes]"]]:
        server = self.start(folder, "serve", TASK, "--dir", RUN, "--port", "0", *SERVED, *options)
        where = folder / RUN / "server.json"
        until(where.is_file, START_S)
        url = json.loads(where.read_text())["url"]
        workers = []
        for number in range(WORKERS):
            own = ("--dir", f"w{number}", "--name", f"w{number}", "--device", str(number))
            workers.append(self.start(folder, "work", TASK, "--server", url, *own, LINE_TRAINING_S="0.05"))
        return server, workers

    def killed(self, folder: Path, *options: str) -> None:
        """By SIGKILL, between two checkpoints, so that a restart has updates to redo."""
        server, workers = self.fleet(folder, *options)
        where = json.loads((folder / RUN / "server.json").read_text())

        def between() -> bool:
            with urllib.request.urlopen(f"{where['url']}/v1/status") as answer:  # noqa: S310 (our own server's)
                t = int(json.load(answer)["t"])
            return t >= KILL_AFTER and t % CHECKPOINT_EVERY in (2, 3)

        try:
            until(between, END_S)
        finally:
            for process in (server, *workers):
                process.send_signal(signal.SIGKILL)
                process.wait()
        (folder / RUN / "server.json").write_text(json.dumps(where | {"url": NOBODY, "pid": 0}))

    # --- on Flower ---------------------------------------------------------------------------------------------------

    def flower_finished(self, folder: Path) -> None:
        self.run(folder, str(RECORDED), "finished", RUN, python=str(self.flower))

    def flower_interrupted(self, folder: Path) -> None:
        self.run(folder, str(RECORDED), "interrupted", RUN, python=str(self.flower), status=9)

    # --- all of them -------------------------------------------------------------------------------------------------

    def make(self, out: Path) -> None:
        """Every run, each begun in a folder of its own, from which it sees nothing of this machine."""
        for name, method in self.methods().items():
            with tempfile.TemporaryDirectory(prefix=f"{name}-") as temporary:
                folder = Path(temporary)
                shutil.copy(HERE / TASK, folder)
                method(folder)
                fold_large_wal(folder / RUN / "ledger.sqlite")
                shutil.rmtree(out / name, ignore_errors=True)
                shutil.copytree(folder / RUN, out / name, ignore=shutil.ignore_patterns(*LEFT_OUT))
            print(f"{name}: {sum(file.stat().st_size for file in (out / name).rglob('*') if file.is_file()):,} bytes")  # noqa: T201

    def expect(self, out: Path) -> None:
        """What this version says about them, and what comes out when it resumes them."""
        self.run(out, str(HERE / "old_runs.py"), str(out))
        if self.flower:
            expected: dict[str, Any] = json.loads((out / EXPECTED).read_text())
            with tempfile.TemporaryDirectory() as temporary:
                shutil.copytree(out / "flower_interrupted", Path(temporary) / RUN)
                resumed = self.run(Path(temporary), str(RECORDED), "resumed", RUN, python=self.flower)
                expected["flower_interrupted"]["resumed"] = json.loads(resumed)
            (out / EXPECTED).write_text(json.dumps(expected, indent=1) + "\n")

    def methods(self) -> dict[str, Callable[[Path], None]]:
        kinds = ("simulated_", "served_", "flower_") if self.flower else ("simulated_", "served_")
        return {name: getattr(self, name) for name in vars(Maker) if name.startswith(kinds)}


def fold_large_wal(ledger: Path) -> None:
    wal = ledger.with_name(f"{ledger.name}-wal")
    if wal.exists() and wal.stat().st_size > WAL_BYTES_MAX:
        connection = sqlite3.connect(ledger)
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        connection.close()


def until(holds: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            raise SystemExit(f"this took more than {seconds:g} s")
        time.sleep(LOOK_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of the version that is recorded")
    parser.add_argument("out", help="the folder beside this file, such as runs_of_0_1")
    parser.add_argument("--flower", metavar="PYTHON", help="with Flower installed; without it, no runs on Flower")
    parser.add_argument("--expect-only", action="store_true", help="record anew what is expected of the runs there are")
    given = parser.parse_args()
    maker, out = Maker(given.checkout.resolve(), given.flower and str(Path(given.flower).absolute())), HERE / given.out
    out.mkdir(exist_ok=True)
    if not given.expect_only:
        maker.make(out)
    maker.expect(out)


if __name__ == "__main__":
    main()
