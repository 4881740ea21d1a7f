"""Owns what a worker claims, and how far it is believed: samples, gradients, and the base of its model.

Rules kept here:
- Gradients: at most what the lease asked for. Where neither the lease nor the settings nor the task say how much that
  is, `gradients_max` bounds them. The sum over all updates always fits 63 bits.
- Samples: declared on joining, at most `samples_max`, and the same in every push; a worker that did not declare any is
  held to those of its first applied update. A later declaration takes the place of the earlier one: devices gather
  data. All of it is in the ledger, so it holds over restarts.
- A model with another base (layout, frozen arrays) than the server's is refused by the name of what differs.
- A push that contradicts this is refused before its body, and counts as a bad update.
"""

import logging
import re
from typing import Any, NamedTuple

from aiohttp import web

from offbeat.core.model_base import ARRAY_LETTERS, difference
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import Lease, WorkerDeclared
from offbeat.server.context import (
    NUMBER_DIGITS_MAX,
    ServerContext,
    context_of,
    json_of,
    number_in_path,
    session_of,
)
from offbeat.server.refusals import Refusal
from offbeat.server.sessions import WorkerSession

GRADIENTS_SUM_MAX = 2**62
"""In all updates of a run. Pushes that arrive at the same time cannot exceed 63 bits together."""
FROZEN_MAX = 500
"""Frozen arrays that a declaration may list."""
FROZEN_NAME_MAX = 1000
DECLARATION = {
    "samples": (int, type(None)),
    "base": (str, type(None)),
    "frozen": (dict, type(None)),
}
"""Fields of a declaration, and their types."""
BASE = re.compile(r"[0-9a-f]{64}")
ARRAY = re.compile(rf"[0-9a-f]{{{ARRAY_LETTERS}}}")

log = logging.getLogger("offbeat.server")


class FalseClaim(Exception):
    """A push contradicts what the server knows."""


class Declaration(NamedTuple):
    samples: int | None
    base: str


def contradiction(context: ServerContext, c: Coordinator, lease: Lease, samples: int, gradients: int) -> str:
    """What of a push's claims cannot be true, in words; empty where nothing speaks against them."""
    session = context.sessions.of(lease.worker)
    known, most = session.samples if session is not None else None, context.limits.samples_max
    if known is not None and samples != known:
        return f"Offbeat-Samples is {samples}, but the samples of this worker are {known}, the same in every push"
    if most is not None and samples > most:
        return f"Offbeat-Samples is {samples}; samples_max is {most}"
    asked = context.asked.gradients(samples) if lease.local_iterations is None else lease.local_iterations
    if asked is not None and gradients > asked:
        return f"Offbeat-Gradients is {gradients}, but task {lease.task} asked for {asked}"
    if context.limits.gradients_max is not None and gradients > context.limits.gradients_max:
        return f"Offbeat-Gradients is {gradients}; gradients_max is {context.limits.gradients_max}"
    if c.gradients_mixed <= GRADIENTS_SUM_MAX < c.gradients_mixed + gradients:  # a run of before may be beyond it
        return f"Offbeat-Gradients is {gradients}; with it, the gradients of this run would be more than can be counted"
    return ""


# --- declarations ----------------------------------------------------------------------------------------------------


async def declare(request: web.Request) -> web.Response:
    """After its task is loaded, a worker says what its pushes are held to, and which base its model has."""
    context = context_of(request)
    session = session_of(request, number_in_path(request, "worker"))
    await note(context, session, declaration_in(context, await json_of(request, DECLARATION)))
    return web.Response(status=204)


def declaration_in(context: ServerContext, body: dict[str, Any]) -> Declaration:
    """What a body declares, if it can be true of a worker of this run."""
    samples, base, frozen = (body.get(name) for name in DECLARATION)
    if samples is not None and not 1 <= samples < 10**NUMBER_DIGITS_MAX:
        raise Refusal("bad_request", f"samples is {samples!r:.40} but must be a whole number >= 1")
    most = context.limits.samples_max
    if samples is not None and most is not None and samples > most:
        raise Refusal("false_claim", f"samples is {samples}; samples_max is {most}")
    if base is not None and not BASE.fullmatch(base):
        raise Refusal("bad_request", "base must be the sha256 of the model's base in hex")
    if frozen is not None and (len(frozen) > FROZEN_MAX or not all(map(_is_array, frozen.items()))):
        raise Refusal("bad_request", f"frozen must be the digests of at most {FROZEN_MAX} arrays by name")
    about = context.about
    if base is not None and about.base and base != about.base:
        unlike = "" if frozen is None else difference(about.frozen, frozen)
        raise Refusal("wrong_base", unlike or "the worker's model has another layout or other frozen arrays")
    return Declaration(samples, base or "")


def _is_array(entry: tuple[str, Any]) -> bool:
    name, digest = entry
    return len(name) <= FROZEN_NAME_MAX and isinstance(digest, str) and bool(ARRAY.fullmatch(digest))


async def note(context: ServerContext, session: WorkerSession, said: Declaration) -> None:
    """Hold the worker to what it said from now on; it is in the ledger before the worker hears of it."""
    samples, base = said.samples or session.samples, said.base or session.base
    if (samples, base) != (session.samples, session.base):
        await context.tell(lambda at: WorkerDeclared(at, session.worker, samples, base))
        context.sessions.declared(session.worker, samples, base)


async def note_first(context: ServerContext, worker: int, samples: int) -> None:
    """An update was applied: a worker that declared no samples is held to those of this one."""
    session = context.sessions.of(worker)
    if session is not None and session.samples is None:
        await note(context, session, Declaration(samples, ""))


def warn_of_unknown_base(context: ServerContext, session: WorkerSession) -> None:
    """A worker of an earlier version does not say which frozen arrays it has: it is admitted, and the log says so."""
    if context.about.frozen and not session.base and not session.base_missed:
        session.base_missed = True
        log.warning(
            "worker %s (%s) does not say which frozen arrays its model has, so nobody would notice if they differ from "
            "the server's; install the server's version of Offbeat where it runs",
            session.worker,
            session.name,
        )
