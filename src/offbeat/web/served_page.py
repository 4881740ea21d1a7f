"""Owns the page of a run that is being served: the server's application, its tokens, its signal after a commit."""

from typing import TYPE_CHECKING

from offbeat.protocol.messages import WorkerBarred, WorkerReadmitted
from offbeat.server.refusals import Refusal
from offbeat.web.app import mount, mount_nothing
from offbeat.web.run_reader import RunReader

if TYPE_CHECKING:
    from offbeat.server.server import Server

BY_HAND = "an administrator said so"
WITHOUT_TOKENS = Refusal(
    "not_allowed",
    "the page is not shown here: without tokens, anyone who reaches this address could look and act",
    do="Start the server with --access (see `offbeat init`), or look on its own machine: offbeat ui DIR.",
)


def furnish(server: "Server") -> None:
    """Add the page to a server that has not opened yet; all that it shows comes from the run's folder."""
    if server.tokens is None and not server.options.limits.private:
        mount_nothing(server.app, WITHOUT_TOKENS)
        return
    context = server.context

    async def act(what: str, worker: int) -> None:
        if context.sessions.of(worker) is None:
            raise Refusal("not_found", f"there is no worker {worker}", do="Look at the list of workers.")
        if what == "readmit":
            await context.tell(lambda at: WorkerReadmitted(at, worker))
        else:
            await context.tell(lambda at: WorkerBarred(at, worker, BY_HAND))

    reading = RunReader(server.options.folder, trouble=lambda: context.run.driver.trouble or context.trouble)
    mount(
        server.app,
        reading,
        tokens=server.tokens,
        tls=server.tls is not None,
        behind_proxy=server.options.limits.behind_proxy,
        act=act,
        committed=lambda: context.committed,
    )
