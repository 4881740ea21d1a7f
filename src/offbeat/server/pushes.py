"""Owns a push from its headers to its acknowledgement: checked before the body, taken in, judged once.

Rules kept here:
- A push is idempotent by its task: the same bytes get the same answer, and other bytes are refused.
- What is refused is refused before the body where that can be known.
- The acknowledgement comes after the update, its decision and all before them are on the disk.
"""

from concurrent.futures import Future
from math import isfinite
from time import monotonic
from typing import Any

from aiohttp import web

from offbeat.digests import BLAKE3, SHA256, is_digest, kind_of, known_digests
from offbeat.errors import InvalidValue, LayoutMismatch, OffbeatError
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, BadUpdateArrived, Command, Lease, Outcome, Spent, UpdateArrived
from offbeat.server.claims import FalseClaim, contradiction, note_first
from offbeat.server.context import (
    ServerContext,
    context_of,
    identity_of,
    number_in_head,
    number_in_path,
    seconds,
    session_of,
)
from offbeat.server.descriptors import refusal_of
from offbeat.server.long_poll import answered
from offbeat.server.refusals import Refusal, answer
from offbeat.server.request_body import json_in
from offbeat.server.served_run import answer_in
from offbeat.server.update_store import Upload
from offbeat.server.uploads import UPLOADS, Head, receive
from offbeat.storage.judged_digest import digest_judged
from offbeat.wire import BadPayload

METRICS_MAX = 4000
METRIC_NAME_MAX = 100
WHY_MAX = 500
_HEX = "sha256 of the whole update in hex"
_KINDS = {(SHA256,): _HEX, (BLAKE3, SHA256): f"{_HEX}, or its blake3 in hex after blake3:"}


async def offset(request: web.Request) -> web.Response:
    context, task = context_of(request), number_in_path(request, "task")
    session = session_of(request)
    await context.ask(lambda c: _refuse_stranger(c, session.worker, task))
    there = await context.off_loop(context.run.updates.offset, task)
    return answer({"offset": there})


async def push(request: web.Request) -> web.Response:
    """Take in one update: a question to the driver before the body, the body, and the driver's decision after it."""
    context = context_of(request)
    head = _head(request, context)
    found = await _early(context, head)
    if not isinstance(found, Lease):
        return _acknowledged(context, found)
    uploads = request.app[UPLOADS]
    if not uploads.has_place(head.task, identity_of(request)):
        raise Refusal("not_now", "too many uploads are under way", retry_after_s=context.settings.retry_after_s)
    await uploads.take(head.task, head.worker, identity_of(request), request)
    try:
        if context.run.updates.is_whole(head.task) and head.task not in uploads.whole:
            found = await _early(context, head)  # another request has brought it meanwhile
        if isinstance(found, Lease):
            found = await _taken_in(request, context, head, found)
    finally:
        uploads.leave(head.task)
    if found.repeated:
        await _refuse_other_bytes(context, head)
    _note_metrics(context, head, found)
    if found.outcome is Outcome.APPLIED and found.decision is not None:
        await note_first(context, head.worker, found.decision.samples)
    return _acknowledged(context, found)


async def _taken_in(request: web.Request, context: ServerContext, head: Head, lease: Lease) -> AnswerPush:
    """Bring the update to the disk, unless it lies there already, and let it be judged."""
    uploads, updates = request.app[UPLOADS], context.run.updates
    updates.set_aside(head.task, idle=False)
    began = monotonic()

    def judged(upload: Upload | None = None) -> "Future[list[Command]]":
        """On a thread: the update is on the disk."""
        uploads.whole[head.task] = head.digest
        return _judged(context, head, lease, monotonic() - began, upload.largest if upload is not None else None)

    try:
        if uploads.has(head, updates):
            decision = await context.off_loop(judged)
        else:
            uploads.whole.pop(head.task, None)
            decision = await receive(request, context, head, judged)
        found = answer_in(await answered(lambda: decision))
    except InvalidValue as error:
        uploads.whole.pop(head.task, None)
        word = "wrong_layout" if isinstance(error, LayoutMismatch) else "not_a_model"
        word = word if isinstance(error, LayoutMismatch | BadPayload) else "bad_request"
        raise await _bad(context, head, word, str(error)) from error
    if found.outcome is Outcome.BUSY:
        updates.set_aside(head.task, idle=True)
    else:
        uploads.whole.pop(head.task, None)
    return found


# --- before the body -------------------------------------------------------------------------------------------------


def _head(request: web.Request, context: ServerContext) -> Head:
    session, task = session_of(request), number_in_path(request, "task")
    theirs, length = request.headers.get("Offbeat-Run", context.run_id), request.content_length
    if theirs != context.run_id:
        raise Refusal("unknown_task", f"the task is of run {theirs[:40]!r}, and run {context.run_id} is served here")
    if length is None:
        raise Refusal("length_required", "an update must say its length")
    if request.content_type != "application/octet-stream":
        raise Refusal("media_type", f"the update is {request.content_type}, not application/octet-stream")
    if request.headers.get("Offbeat-Encoding", "float32") != "float32":
        raise Refusal("media_type", "the only encoding so far is float32")
    begin = number_in_head(request, "Offbeat-Offset", 0, 0)
    size = number_in_head(request, "Offbeat-Size", 1, max(1, begin + length))
    if size > context.run.updates.size_max or begin + length > size:
        limit = context.run.updates.size_max
        raise Refusal("too_long", f"the update has {max(size, begin + length)} bytes; {min(limit, size)} are possible")
    if begin + length != size:
        raise Refusal("bad_request", f"{length} bytes from {begin} on are not all of the {size} that the update has")
    digest = request.headers.get("Offbeat-Digest", "")
    if not is_digest(digest) or kind_of(digest) not in known_digests():
        raise Refusal("bad_request", f"the header Offbeat-Digest must be the {_KINDS[known_digests()]}")
    layout = request.headers.get("Offbeat-Layout", context.run.layout.fingerprint)
    if layout != context.run.layout.fingerprint:
        raise Refusal("wrong_layout", "the update is of another layout than this run's model")
    samples = number_in_head(request, "Offbeat-Samples", 1)
    gradients = number_in_head(request, "Offbeat-Gradients", 0)
    said = ("Offbeat-Download-S", "Offbeat-Train-S")
    spent = [seconds(f"the header {name}", request.headers.get(name, "0")) for name in said]
    return Head(task, session.worker, digest, size, begin, samples, gradients, _metrics(request), *spent)


def _metrics(request: web.Request) -> dict[str, float]:
    text = request.headers.get("Offbeat-Metrics", "{}")
    if text == "{}":
        return {}
    try:
        metrics = json_in(text) if len(text) <= METRICS_MAX else None
        if isinstance(metrics, dict) and all(_is_metric(name, value) for name, value in metrics.items()):
            return {name: float(value) for name, value in metrics.items()}
    except ValueError:
        pass
    raise Refusal("bad_request", f"Offbeat-Metrics must be a JSON object of numbers, at most {METRICS_MAX} letters")


def _is_metric(name: str, value: Any) -> bool:
    named = name.isprintable() and name.isascii() and len(name) <= METRIC_NAME_MAX
    return named and isinstance(value, int | float) and not isinstance(value, bool)


async def _early(context: ServerContext, head: Head) -> Lease | AnswerPush:
    """What is known before the body: the lease under which it is pushed, or the answer, which needs no body.

    A push that will be refused is refused here. The lease is passed on: the driver is not asked for it again.
    """
    open_lease = _open_lease(context, head)
    if open_lease is not None:
        return open_lease
    try:
        known: Lease | AnswerPush | None = await context.ask(lambda c: _known(context, c, head))
    except FalseClaim as error:
        raise await _bad(context, head, "false_claim", str(error)) from error
    if isinstance(known, Lease):
        return known
    if known is not None:
        await _refuse_other_bytes(context, head)
    return answer_in(
        await context.tell(
            lambda at: UpdateArrived(at, head.worker, head.task, head.samples, head.gradients, digest=head.digest)
        )
    )


def _open_lease(context: ServerContext, head: Head) -> Lease | None:
    """The lease of an ordinary push, without a visit of the driver and its wait for the disk; None to ask the driver.

    The worker knows the task, so it is on the disk. Whatever changes meanwhile, the driver decides after the body.
    """
    c, driver = context.run.coordinator, context.run.driver
    lease = c.book.open.get(head.task)
    if lease is None or lease.worker != head.worker or head.task in c.judge.answers:
        return None
    if c.end_reason or c.queued >= c.plan.queue_max or driver.trouble is not None or driver.failure is not None:
        return None
    return None if contradiction(context, c, lease, head.samples, head.gradients) else lease


def _known(context: ServerContext, c: Coordinator, head: Head) -> Lease | AnswerPush | None:
    """The lease of a push that is to be judged, or the answer that its task got before; None after the end."""
    first = c.judge.answers.get(head.task)
    if first is not None and first.worker == head.worker:
        return first
    _refuse_stranger(c, head.worker, head.task)
    if c.end_reason:
        return None
    lease = c.book.find(head.task)[0]
    false = "" if lease is None else contradiction(context, c, lease, head.samples, head.gradients)
    if false:
        raise FalseClaim(false)
    if c.queued >= c.plan.queue_max:
        raise _busy(c.plan.retry_after_s)
    return lease


async def _refuse_other_bytes(context: ServerContext, head: Head) -> None:
    """A task that was answered is answered again for the same bytes, and for no others; the ledger has their digest."""
    if not await context.off_loop(_are_the_same, context, head):
        message = f"task {head.task} was answered before, for an update with other bytes; nothing has changed"
        raise Refusal("other_bytes", message)


def _are_the_same(context: ServerContext, head: Head) -> bool:
    """Is this digest of the bytes that were judged? One of another kind is compared with the bytes that are kept."""
    judged = digest_judged(context.run.ledger.path, head.task)
    if judged in ("", head.digest):
        return True
    updates = context.run.updates
    try:
        return kind_of(judged) != kind_of(head.digest) and updates.holds(head.task, [head.digest])
    except BadPayload:  # it is gone
        return False


def _busy(retry_after_s: float) -> Refusal:
    return Refusal("busy", "more updates wait to be mixed than may", retry_after_s=retry_after_s)


def _refuse_stranger(c: Coordinator, worker: int, task: int) -> None:
    first, (lease, _) = c.judge.answers.get(task), c.book.find(task)
    if first is None and lease is None:
        raise Refusal("unknown_task", f"task {task} was never leased, or is long over")
    owner = first.worker if first is not None else lease.worker if lease is not None else None
    if owner != worker:
        raise Refusal("not_yours", f"task {task} was leased to another worker")


async def _bad(context: ServerContext, head: Head, word: str, why: str) -> Refusal:
    """An update that is no model of ours, or a false claim: it counts against the worker."""
    why = why[:WHY_MAX]
    await context.tell(lambda at: BadUpdateArrived(at, head.worker, head.task, why))
    return Refusal(word, why)


# --- after the body --------------------------------------------------------------------------------------------------


def _judged(
    context: ServerContext, head: Head, lease: Lease, upload_s: float, largest: float | None
) -> "Future[list[Command]]":
    """On a thread: the future of the driver's decision, or of what kept it from deciding."""
    spent = Spent(head.download_s, head.train_s, upload_s) if head.train_s else None  # the worker did not say
    failed: Future[list[Command]] = Future()
    try:
        return context.run.push(lease, head.samples, head.gradients, head.digest, spent, largest)
    except OSError as error:  # it is there, and cannot be looked at just now: too many open files, say
        failed.set_exception(refusal_of("read it", error))
    except OffbeatError as error:  # it is no model, or nothing can be decided now
        failed.set_exception(error)
    context.run.updates.forget(head.task)
    return failed


def _note_metrics(context: ServerContext, head: Head, found: AnswerPush) -> None:
    """Where the server has no test data, it gathers what workers measured."""
    decision = found.decision
    if found.outcome is Outcome.APPLIED and decision is not None and not found.repeated and not context.metrics_known:
        metrics = {name: value for name, value in head.metrics.items() if isfinite(value)}
        context.reports.add(decision.lease.tau, decision.samples, metrics, decision.lease.device)


def _acknowledged(context: ServerContext, found: AnswerPush) -> web.Response:
    """The answer; the head of the ledger's chain in it covers this decision and all before it."""
    if found.outcome is not Outcome.APPLIED:
        raise _refused(found)
    decision = found.decision
    if decision is None or decision.mix is None:
        raise AssertionError("an applied update has a decision")
    body: dict[str, Any] = {"task": found.task, "outcome": found.outcome.value, "t": decision.t}
    body |= {"tau": decision.lease.tau, "staleness": decision.staleness, "alpha_t": decision.mix.new}
    return answer(body | {"repeated": found.repeated, "head": context.run.ledger.head.hex()})


def _refused(found: AnswerPush) -> Refusal:
    said = {
        Outcome.TOO_STALE: f"the update of task {found.task} is too stale",
        Outcome.NOT_FINITE: f"the update of task {found.task} holds NaN or infinity",
        Outcome.TOO_LARGE: f"the update of task {found.task} is further from x_tau than the gate lets pass",
        Outcome.FINISHED: "the run is finished",
        Outcome.QUARANTINED: "this worker is quarantined",
    }
    if found.outcome is Outcome.BUSY:
        return _busy(found.retry_after_s or 1.0)
    if found.why:
        return Refusal(found.outcome.value, f"task {found.task}: {found.why}")
    return Refusal(found.outcome.value, said.get(found.outcome, f"task {found.task}: {found.outcome.value}"))
