"""Owns readers that take nothing: one that does so for too long is cut off, and one that has gone is no failure."""

import asyncio

from aiohttp import web


async def write_within(
    request: web.Request, response: web.StreamResponse, data: bytes | memoryview, patience_s: float
) -> None:
    """Write; a reader that does not take it within this time is cut off, and `ConnectionError` says so."""
    try:
        async with asyncio.timeout(patience_s):
            await response.write(data)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError(f"the reader took nothing for {patience_s:g} s") from error


def has_gone(request: web.Request, error: Exception) -> bool:
    """Did this fail because the client hung up? uvloop says so with an error that is no `ConnectionError`."""
    return isinstance(error, RuntimeError) and (request.transport is None or request.transport.is_closing())
