"""Owns how updates come in: checked before their body is sent, written and hashed off the event loop, judged once.

Rules kept here:
- A push is idempotent by its task. What is refused is refused before the body where that can be known.
- A cut upload can be appended to; a newer request for the same task closes the older one's connection.
- The acknowledgement comes after the update, its decision and all before them are on the disk.
- A stalled upload holds its connection and its partial file, and nobody else.
"""

import asyncio
import errno
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field
from math import isfinite
from time import monotonic
from typing import Any

from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from offbeat.errors import InvalidValue, LayoutMismatch
from offbeat.protocol.coordinator import Coordinator
from offbeat.protocol.messages import AnswerPush, BadUpdateArrived, Command, Outcome, Spent, UpdateArrived
from offbeat.server.hub import Stuck
from offbeat.server.refusals import OUTCOMES, Refusal, answer
from offbeat.server.service import Service, number_in_head, number_in_path, seconds_in_head, service_of, session_of
from offbeat.server.updates import DiskFull, Upload, WrongDigest, WrongOffset
from offbeat.wire import BadPayload

PIECE = 1 << 20
PARTS_MAX = 256
PIECE_STALLS = 10
"""A piece that takes longer than so many times stall_s is no upload: one byte now and then would hold a place."""
METRICS_MAX = 4000
METRIC_NAME_MAX = 100
DIGEST = re.compile(r"[0-9a-f]{64}")
DISK_FULL_RETRY_S = 5.0
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Head:
    """What a push says about itself."""

    task: int
    worker: int
    digest: str
    size: int
    offset: int
    samples: int
    gradients: int
    metrics: dict[str, float]
    download_s: float
    train_s: float


@dataclass(slots=True)
class Place:
    """Where one task's upload is written, by one connection at a time."""

    transport: asyncio.Transport | None = None
    """Of the newest that wants it."""
    worker: int = -1
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    wanted: int = 0
    """How many have it or wait for it."""


class Uploads:
    """The uploads that are under way, one per task."""

    def __init__(self) -> None:
        self._of: dict[int, Place] = {}
        self.whole: dict[int, str] = {}
        """Digests of updates that are there whole and met a full queue: their body need not come again."""

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, task: int) -> bool:
        return task in self._of

    def has(self, head: Head, service: Service) -> bool:
        """Is this very update there already?"""
        return head.offset == 0 and self.whole.get(head.task) == head.digest and service.run.updates.has(head.task)

    async def take(self, task: int, worker: int, transport: asyncio.Transport | None) -> None:
        """The right to write this task's upload; whoever had it, or another one of this worker's, is cut off."""
        for other in self._of.values():
            if other.worker == worker and other.transport is not None:
                other.transport.abort()
        place = self._of.setdefault(task, Place())
        place.worker = worker
        if place.transport is not None:
            place.transport.abort()
        place.transport = transport
        place.wanted += 1
        try:
            await place.lock.acquire()
        except BaseException:
            self._less(task, place)
            raise

    def leave(self, task: int) -> None:
        """Done with it."""
        place = self._of[task]
        place.lock.release()
        self._less(task, place)

    def _less(self, task: int, place: Place) -> None:
        place.wanted -= 1
        if not place.wanted:
            del self._of[task]


UPLOADS = web.AppKey("uploads", Uploads)


async def offset(request: web.Request) -> web.Response:
    """How many bytes are there."""
    service, task = service_of(request), number_in_path(request, "task")
    session = session_of(request)
    await service.desk.ask(lambda c: _refuse_stranger(c, session.worker, task))
    there = await service.off_loop(service.run.updates.offset, task)
    return answer({"offset": there})


async def push(request: web.Request) -> web.Response:
    """An update."""
    service = service_of(request)
    head = _head(request, service)
    early = await _early(service, head)
    if early is not None:
        return _acknowledged(early, service)
    uploads = request.app[UPLOADS]
    if head.task not in uploads and len(uploads) >= service.limits.uploads_max:
        raise Refusal("not_now", "too many uploads are under way", retry_after_s=service.settings.retry_after_s)
    await uploads.take(head.task, head.worker, request.transport)
    try:
        commands = await _early(service, head)  # another request may have brought it meanwhile
        if commands is None:
            service.run.updates.set_aside(head.task, idle=False)
            began = monotonic()
            if not uploads.has(head, service):
                uploads.whole.pop(head.task, None)
                await _receive(request, service, head)
                uploads.whole[head.task] = head.digest
            commands = await _judged(service, head, uploads, monotonic() - began)
            if _outcome(commands) is Outcome.BUSY:
                service.run.updates.set_aside(head.task, idle=True)
            else:
                uploads.whole.pop(head.task, None)
    finally:
        uploads.leave(head.task)
    return _acknowledged(commands, service, head)


# --- before the body -------------------------------------------------------------------------------------------------


def _head(request: web.Request, service: Service) -> Head:
    session, task = session_of(request), number_in_path(request, "task")
    length = request.content_length
    if length is None:
        raise Refusal("length_required", "an update must say its length")
    if request.content_type != "application/octet-stream":
        raise Refusal("media_type", f"the update is {request.content_type}, not application/octet-stream")
    if request.headers.get("Offbeat-Encoding", "float32") != "float32":
        raise Refusal("media_type", "the only encoding so far is float32")
    begin = number_in_head(request, "Offbeat-Offset", 0, 0)
    size = number_in_head(request, "Offbeat-Size", 1, max(1, begin + length))
    if size > service.run.updates.size_max or begin + length > size:
        limit = service.run.updates.size_max
        raise Refusal("too_long", f"the update has {max(size, begin + length)} bytes; {min(limit, size)} are possible")
    if begin + length != size:
        raise Refusal("bad_request", f"{length} bytes from {begin} on are not all of the {size} that the update has")
    digest = request.headers.get("Offbeat-Digest", "")
    if not DIGEST.fullmatch(digest):
        raise Refusal("bad_request", "the header Offbeat-Digest must be the sha256 of the whole update in hex")
    layout = request.headers.get("Offbeat-Layout", service.run.layout.fingerprint)
    if layout != service.run.layout.fingerprint:
        raise Refusal("wrong_layout", "the update is of another layout than this run's model")
    samples = number_in_head(request, "Offbeat-Samples", 1)
    gradients = number_in_head(request, "Offbeat-Gradients", 0)
    spent = (seconds_in_head(request, "Offbeat-Download-S"), seconds_in_head(request, "Offbeat-Train-S"))
    return Head(task, session.worker, digest, size, begin, samples, gradients, _metrics(request), *spent)


def _metrics(request: web.Request) -> dict[str, float]:
    text = request.headers.get("Offbeat-Metrics", "{}")
    try:
        metrics = json.loads(text) if len(text) <= METRICS_MAX else None
        if isinstance(metrics, dict):
            return {_metric_name(name): _metric(value) for name, value in metrics.items()}
    except (TypeError, ValueError, RecursionError, OverflowError):
        pass
    raise Refusal("bad_request", f"Offbeat-Metrics must be a JSON object of numbers, at most {METRICS_MAX} letters")


def _metric_name(name: str) -> str:
    if not (name.isprintable() and name.isascii() and len(name) <= METRIC_NAME_MAX):
        raise ValueError(name)
    return name


def _metric(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(value)
    return float(value)


async def _early(service: Service, head: Head) -> list[Command] | None:
    """What can be answered without the body: a push that was answered before, or one that will be refused."""
    answered, refusal = await service.desk.ask(lambda c: _foreseen(c, head))
    if refusal is not None:
        raise refusal
    if not answered:
        return None
    return await service.desk.tell(
        lambda at: UpdateArrived(at, head.worker, head.task, head.samples, head.gradients, digest=head.digest)
    )


def _foreseen(c: Coordinator, head: Head) -> tuple[bool, Refusal | None]:
    first = c.judge.answers.get(head.task)
    if first is not None and first.worker == head.worker:
        return True, None
    try:
        _refuse_stranger(c, head.worker, head.task)
    except Refusal as refusal:
        return False, refusal
    if c.end_reason:
        return True, None
    if c.queued >= c.plan.queue_max:
        return False, _busy(c.plan.retry_after_s)
    return False, None


def _busy(retry_after_s: float) -> Refusal:
    return Refusal("busy", "more updates wait to be mixed than may", retry_after_s=retry_after_s)


def _refuse_stranger(c: Coordinator, worker: int, task: int) -> None:
    first, (lease, _) = c.judge.answers.get(task), c.book.find(task)
    if first is None and lease is None:
        raise Refusal("unknown_task", f"task {task} was never leased, or is long over")
    owner = first.worker if first is not None else lease.worker if lease is not None else None
    if owner != worker:
        raise Refusal("not_yours", f"task {task} was leased to another worker")


# --- the body --------------------------------------------------------------------------------------------------------


async def _receive(request: web.Request, service: Service, head: Head) -> None:
    """Write what comes; the whole update is on the disk when this returns."""
    upload = await _opened(service, head)
    try:
        await say_continue(request)
        await _written(request, service, upload)
        await service.off_loop(upload.finish, head.digest)
    except (asyncio.CancelledError, ConnectionError):
        await asyncio.shield(service.off_loop(upload.close))
        raise
    except (Refusal, RequestPayloadError):
        await service.off_loop(upload.close)
        raise
    except OSError as error:
        await service.off_loop(_abandon, upload)
        if error.errno not in FULL:
            raise
        raise Refusal(
            "disk_full", f"the server cannot keep the update: {error.strerror}", retry_after_s=DISK_FULL_RETRY_S
        ) from error
    except WrongDigest as error:
        raise Refusal("digest", str(error)) from error
    except InvalidValue as error:
        await service.off_loop(_abandon, upload)
        raise await _bad(service, head, error) from error


async def _opened(service: Service, head: Head) -> Upload:
    updates = service.run.updates
    try:
        if head.offset:
            return await service.off_loop(updates.resume, head.task, head.size, head.offset)
        return await service.off_loop(updates.begin, head.task, head.size)
    except WrongOffset as error:
        raise Refusal("wrong_offset", str(error), offset=error.offset) from error
    except DiskFull as error:
        raise Refusal("disk_full", str(error), retry_after_s=DISK_FULL_RETRY_S) from error
    except OSError as error:
        raise Refusal(
            "disk_full", f"the server cannot write: {error.strerror}", retry_after_s=DISK_FULL_RETRY_S
        ) from error


async def say_continue(request: web.Request) -> None:
    """The body may come."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _written(request: web.Request, service: Service, upload: Upload) -> None:
    """Write what comes, in large pieces; what came before a cut is written too, so that it need not come again."""
    waiting, size, stall_s = list[bytes](), 0, service.limits.stall_s
    until = monotonic() + PIECE_STALLS * stall_s
    try:
        while not request.content.at_eof():
            async with asyncio.timeout(min(stall_s, until - monotonic())):
                data = await request.content.readany()
            service.metrics.received(len(data))
            waiting.append(data)
            size += len(data)
            if len(waiting) >= PARTS_MAX:  # they come in crumbs
                waiting = [b"".join(waiting)]
            if size >= PIECE:
                piece, waiting, size = waiting, [], 0
                await service.off_loop(upload.write, *piece)
                until = monotonic() + PIECE_STALLS * stall_s
    except TimeoutError:
        await _rest(service, upload, waiting)
        raise Refusal("stalled", f"nothing, or too little, came for {stall_s:g} s") from None
    except (asyncio.CancelledError, ConnectionError, RequestPayloadError):
        await _rest(service, upload, waiting)
        raise
    if waiting:
        await service.off_loop(upload.write, *waiting)


async def _rest(service: Service, upload: Upload, waiting: list[bytes]) -> None:
    with suppress(InvalidValue, OSError):
        await service.off_loop(upload.write, *waiting)


def _abandon(upload: Upload) -> None:
    upload.close()
    upload.folder.discard(upload.task)


async def _bad(service: Service, head: Head, error: InvalidValue) -> Refusal:
    """An update that is no model of ours: it counts against the worker."""
    why = str(error)[:500]
    await service.desk.tell(lambda at: BadUpdateArrived(at, head.worker, head.task, why))
    word = "wrong_layout" if isinstance(error, LayoutMismatch) else "not_a_model"
    return Refusal(word if isinstance(error, LayoutMismatch | BadPayload) else "bad_request", why)


# --- after the body --------------------------------------------------------------------------------------------------


async def _judged(service: Service, head: Head, uploads: Uploads, upload_s: float) -> list[Command]:
    spent = Spent(head.download_s, head.train_s, upload_s) if head.train_s else None  # it did not say
    numbers = (head.worker, head.task, head.samples, head.gradients, head.digest, spent)
    try:
        decision = await service.off_loop(service.run.push, *numbers)
        return await asyncio.shield(asyncio.wrap_future(decision))
    except InvalidValue as error:
        uploads.whole.pop(head.task, None)
        raise await _bad(service, head, error) from error
    except Stuck as error:
        raise Refusal("disk_full", str(error), retry_after_s=DISK_FULL_RETRY_S) from error
    except OSError as error:  # it is there, and cannot be looked at just now: too many open files, say
        message = f"the server cannot read it now: {error.strerror}"
        raise Refusal("not_now", message, retry_after_s=DISK_FULL_RETRY_S) from error


def _outcome(commands: list[Command]) -> Outcome:
    return next(command.outcome for command in commands if isinstance(command, AnswerPush))


def _acknowledged(commands: list[Command], service: Service, head: Head | None = None) -> web.Response:
    found = next(command for command in commands if isinstance(command, AnswerPush))
    if found.outcome is not Outcome.APPLIED:
        raise _refused(found)
    decision = found.decision
    if decision is None or decision.mix is None:
        raise AssertionError("an applied update has a decision")
    if head is not None and not found.repeated and not service.metrics_known:
        metrics = {name: value for name, value in head.metrics.items() if isfinite(value)}
        service.reports.add(decision.lease.tau, decision.samples, metrics)
    body: dict[str, Any] = {"task": found.task, "outcome": found.outcome.value, "t": decision.t}
    body |= {"tau": decision.lease.tau, "staleness": decision.staleness, "alpha_t": decision.mix.new}
    return answer(body | {"repeated": found.repeated})


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
    return Refusal(OUTCOMES[found.outcome], said.get(found.outcome, f"task {found.task}: {found.outcome.value}"))
