"""Owns the page of a run that is being served: the server's own application, its tokens, its word of every commit."""

from typing import TYPE_CHECKING

from offbeat.protocol.messages import WorkerBarred, WorkerReadmitted
from offbeat.server.refusals import Refusal
from offbeat.web.app import mount
from offbeat.web.reading import Reading

if TYPE_CHECKING:
    from offbeat.server.life import Server

BY_HAND = "an administrator said so"


def furnish(server: "Server") -> None:
    """Add the page to a server that has not opened yet; all that it shows comes from the run's folder."""
    service = server.service

    async def act(what: str, worker: int) -> None:
        if service.sessions.of(worker) is None:
            raise Refusal("not_found", f"there is no worker {worker}", do="Look at the list of workers.")
        if what == "readmit":
            await service.desk.tell(lambda at: WorkerReadmitted(at, worker))
        else:
            await service.desk.tell(lambda at: WorkerBarred(at, worker, BY_HAND))

    reading = Reading(server.order.folder, trouble=lambda: service.run.hub.trouble or service.trouble)
    mount(
        server.app,
        reading,
        tokens=server.tokens,
        tls=server.tls is not None,
        act=act,
        committed=lambda: service.committed,
    )
