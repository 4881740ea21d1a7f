"""Owns a worker process that notes when each of its updates was acknowledged, and how long that took.

It is the worker that `offbeat work` runs, with a clock around `push`: from the first byte to the acknowledgement. When
it ends, it writes its notes to a file: [[moment, seconds], ...], on the clock that all processes of a machine share.
"""

import argparse
import json
from pathlib import Path
from time import monotonic

from offbeat.hosting.loading import load
from offbeat.hosting.task_identity import identity
from offbeat.settings import Settings
from offbeat.task import Task
from offbeat.worker.api_answers import Acknowledgement, Joined
from offbeat.worker.api_client import ApiClient, Hello, common_headers
from offbeat.worker.http_client import HttpClient
from offbeat.worker.loop import Worker
from offbeat.worker.outbox import Finished, Outbox
from offbeat.worker.settings import WorkerSettings


class TimedClient(ApiClient):
    """Notes how long a push takes."""

    noted: list[tuple[float, float]]

    def push(self, finished: Finished, *, resume: bool = False) -> Acknowledgement:
        begun = monotonic()
        answer = super().push(finished, resume=resume)
        now = monotonic()
        self.noted.append((now, now - begun))
        return answer


def work(task: str, settings: WorkerSettings, folder: Path, notes: Path) -> None:
    """Work until told to stop, then write the notes."""
    http = HttpClient(settings.address, common_headers(settings.token), settings.context(), settings.timeouts)
    with Outbox(folder, name=settings.name) as outbox:
        calls = TimedClient(http, Hello(outbox.name, identity(task), settings.device))
        calls.noted = []

        def make(joined: Joined) -> Task:
            return load(task, Settings.of(joined.settings))

        try:
            Worker(calls, outbox, make, settings).run()
        finally:
            notes.write_text(json.dumps(calls.noted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("task", "server", "folder", "notes", "name"):
        parser.add_argument(name)
    parser.add_argument("--token")
    parser.add_argument("--ca", type=Path)
    given = parser.parse_args()
    settings = WorkerSettings(given.server, token=given.token, ca=given.ca, name=given.name)
    work(given.task, settings, Path(given.folder), Path(given.notes))


if __name__ == "__main__":
    main()
