"""Owns the end of waiting for a reader: one that takes nothing for too long is cut off."""

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
