"""A body may come in crumbs: they are written in large pieces, every byte once and in order."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from offbeat.server import uploads


class Body:
    """What aiohttp hands out, in parts of a given size."""

    def __init__(self, data: bytes, size: int) -> None:
        self.parts = [data[lo : lo + size] for lo in range(0, len(data), size)]

    def at_eof(self) -> bool:
        return not self.parts

    async def readany(self) -> bytes:
        return self.parts.pop(0)


@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 16, 1 << 21])
def test_every_byte_is_written_once_and_in_order(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PIECE", 10_000)
    data, calls = bytes(range(256)) * 100, list[tuple[bytes, ...]]()

    async def off_loop(function: Any, *arguments: Any) -> None:
        function(*arguments)

    context: Any = SimpleNamespace(metrics=SimpleNamespace(received=lambda _: None), off_loop=off_loop)
    request: Any = SimpleNamespace(content=Body(data, size))
    upload: Any = SimpleNamespace(write=lambda *parts: calls.append(parts))
    asyncio.run(uploads._written(request, context, upload, uploads.UploadPace(60.0, 1024)))
    assert b"".join(part for parts in calls for part in parts) == data
    assert max(len(parts) for parts in calls) <= uploads.PARTS_MAX
