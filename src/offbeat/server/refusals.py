"""Owns how the server says no: a status, a word that programs can rely on, a sentence, and what to do next.

Every refusal of the API is made here and listed in docs/operations.md. A push that is not applied is refused with the
word of its outcome.
"""

import json
import random
from collections.abc import Mapping
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple

from aiohttp import web

SPREAD = 1.0
"""A wait is lengthened by a random part of up to this many times itself, so that clients do not all come at once."""


class Kind(NamedTuple):
    status: int
    do: str


KINDS: dict[str, Kind] = {
    "bad_request": Kind(400, "Send what the API document (/v1/openapi.json) describes."),
    "digest": Kind(400, "Send the update again from its start."),
    "no_token": Kind(401, "Send `Authorization: Bearer TOKEN` with a token from `offbeat token add`."),
    "bad_token": Kind(401, "Use a token from `offbeat token add` that has not been revoked."),
    "unknown_session": Kind(401, "Join again: POST /v1/workers."),
    "replaced": Kind(401, "Give every worker its own --name, or its own token."),
    "not_allowed": Kind(403, "Use a token whose role allows this."),
    "not_yours": Kind(403, "Push, extend or hand back only tasks that were leased to you."),
    "quarantined": Kind(403, "Look at why; an administrator can lift it: offbeat readmit URL WORKER."),
    "wrong_origin": Kind(403, "Use this server's own page; if this was it, start the server with --public-name NAME."),
    "not_found": Kind(404, "Look at the API document for the paths that there are: /v1/openapi.json."),
    "unknown_task": Kind(404, "Drop the update and ask for a task."),
    "method_not_allowed": Kind(405, "Look at the API document for the methods that there are."),
    "stalled": Kind(408, "Ask for the offset and append from there."),
    "wrong_offset": Kind(409, "Append from `offset`."),
    "wrong_base": Kind(409, "Give the worker the task and the frozen arrays (the base model) that the server has."),
    "superseded": Kind(409, "Nothing: a newer request of the same worker has taken over."),
    "too_stale": Kind(409, "Drop the update and ask for a task."),
    "finished": Kind(409, "Drop the update; the run is over."),
    "other_bytes": Kind(409, "Drop the update and ask for a task: the first one that was pushed for this task counts."),
    "gone": Kind(410, "Ask for a task again: it starts from the newest version."),
    "released": Kind(410, "Go on and push: a late update is still judged. Or stop, and ask for a task."),
    "revoked": Kind(410, "Stop; this update would be refused. Ask for a task."),
    "length_required": Kind(411, "Send Content-Length."),
    "too_long": Kind(413, "Send fewer bytes; the limit is in the message."),
    "media_type": Kind(415, "Send application/json, or an update as float32 safetensors."),
    "no_such_bytes": Kind(416, "Ask for a range within the model."),
    "wrong_host": Kind(421, "Use the server's own name or address; if this is one, start it with --public-name NAME."),
    "not_a_model": Kind(422, "Send a safetensors file with just the arrays of the model."),
    "wrong_layout": Kind(422, "Train the model that the server serves: same names, shapes and dtypes."),
    "not_finite": Kind(422, "Drop the update; look at why training diverged, for instance at gamma."),
    "too_large": Kind(422, "Drop the update; its step is above norm_max, or a value in it above value_max."),
    "false_claim": Kind(422, "Drop the update; claim the declared samples, and no more gradients than were asked for."),
    "wrong_version": Kind(426, "Install the same version of Offbeat on workers and server."),
    "wrong_scheme": Kind(426, "Use https:// where the server speaks TLS, and http:// where it does not."),
    "busy": Kind(429, "Push again after Retry-After seconds."),
    "not_now": Kind(503, "Come back after Retry-After seconds."),
    "no_descriptors": Kind(
        503, "Come back after Retry-After seconds; somebody must raise the server's limit of open files (LimitNOFILE)."
    ),
    "stopping": Kind(503, "Come back after Retry-After seconds; the server is being stopped or restarted."),
    "not_installed": Kind(501, "Install it where the server runs, and start the server again."),
    "disk_full": Kind(507, "Push again after Retry-After seconds; somebody must make room on the server's disk."),
    "internal": Kind(500, "Try again; if it stays, look at the server's log."),
}


class Refusal(Exception):
    def __init__(
        self,
        error: str,
        message: str,
        *,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(message)
        self.headers = dict(headers or {})
        self.error, self.message, self.facts = error, message, facts
        self.retry_after_s = retry_after_s

    @property
    def status(self) -> int:
        return KINDS[self.error].status

    def response(self) -> web.Response:
        """As JSON; clients that are to come back are told when, each a little differently."""
        body: dict[str, Any] = {"error": self.error, "message": self.message, "do": KINDS[self.error].do, **self.facts}
        headers = dict(self.headers)
        if self.retry_after_s is not None:
            body["retry_after_s"] = round(self.retry_after_s * (1 + SPREAD * random.random()), 3)  # noqa: S311 (jitter)
            headers["Retry-After"] = str(ceil(body["retry_after_s"]))
        return answer(body, status=self.status, headers=headers)


def answer(body: Mapping[str, Any], *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    text = json.dumps(body, allow_nan=False)
    return web.Response(text=text, status=status, headers=headers, content_type="application/json")


def raw(refusal: Refusal, headers: Mapping[str, str] | None = None) -> bytes:
    """A refusal as bytes on the wire, for a connection that no handler has yet; it closes the connection."""
    response = refusal.response()
    body = str(response.text).encode()
    fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    fields |= {name: value for name, value in response.headers.items() if name == "Retry-After"} | dict(headers or {})
    lines = [f"HTTP/1.1 {refusal.status} {HTTPStatus(refusal.status).phrase}", *map(": ".join, fields.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


def of_http(error: web.HTTPException) -> Refusal:
    """What aiohttp refuses by itself, as a refusal of the API."""
    words = {404: "not_found", 405: "method_not_allowed", 411: "length_required", 413: "too_long", 415: "media_type"}
    kept = {name: value for name, value in error.headers.items() if name == "Allow"}
    return Refusal(words.get(error.status, "bad_request"), error.text or error.reason, headers=kept)
