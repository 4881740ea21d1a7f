"""Owns how a small body is read: it comes in time, and as JSON it is neither deep, nor long, nor full of digits.

Rules kept here:
- Every body has a time by which all of it must be there, on every route, those of the page included.
- What a client sent is looked over before it is parsed: parsing holds the interpreter, so its cost must be known.
  Even the worst text takes less than five milliseconds.
- Whole numbers fit 63 bits: they end up in SQLite, which has no larger ones.
"""

import asyncio
import json
import re
from typing import Any

from aiohttp import web

from offbeat.server.refusals import Refusal
from offbeat.wire import once

DEPTH_MAX = 8
TOKENS_MAX = 2000
"""Brackets, commas and texts: an object of a thousand entries has fewer."""
WHOLE_MAX = (1 << 63) - 1
DIGITS_MAX = 400
"""Signs of one number; floats of a machine need less."""

_TOKEN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)
_DIGITS = re.compile(rf"[-+.0-9eE]{{{DIGITS_MAX + 1}}}")


async def read_body(request: web.Request, within_s: float) -> bytes:
    """All of the body; refused where it does not come in time."""
    try:
        async with asyncio.timeout(within_s):
            return await request.read()
    except TimeoutError as error:
        message = f"the body did not come within {within_s:g} s"
        raise Refusal("stalled", message, do="Send the request again, and all of its body at once.") from error


def json_in(text: bytes | str) -> Any:
    """What this JSON says; `ValueError` where it is none, or larger or deeper than any that the API asks for."""
    shown = text.decode("utf-8") if isinstance(text, bytes) else text
    _look_over(shown)
    try:
        return json.loads(shown, object_pairs_hook=once, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("it is too deep") from error


def _look_over(text: str) -> None:
    depth, bare = 0, []
    for count, found in enumerate(_TOKEN.finditer(text)):
        token = found[0]
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        if depth > DEPTH_MAX or count >= TOKENS_MAX:
            raise ValueError(f"it is deeper than {DEPTH_MAX}, or has more than {TOKENS_MAX} parts")
        bare.append(found.span())
    begin = 0
    for start, end in (*bare, (len(text), len(text))):
        if start - begin > DIGITS_MAX and _DIGITS.search(text, begin, start):
            raise ValueError(f"a number in it has more than {DIGITS_MAX} signs")
        begin = end


def _whole(digits: str) -> int:
    number = int(digits) if len(digits) <= len(str(-WHOLE_MAX)) else WHOLE_MAX + 1
    if not -WHOLE_MAX <= number <= WHOLE_MAX:
        raise ValueError("a whole number in it does not fit 63 bits")
    return number
