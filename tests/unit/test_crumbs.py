"""A body may come in crumbs: every byte is taken once and in order, in large pieces, and memory is bounded."""

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

from offbeat.server import body_receiver
from offbeat.server.body_receiver import ALIGNED, BodyReceiver, UploadMemory

DATA = bytes(range(256)) * 100
PIECE = 10_048


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_receiver, "PIECE", PIECE)


def received(body: BodyReceiver, size: int) -> list[bytes]:
    """All that is taken while DATA comes in parts of this size, as a socket fills what it is given."""
    at, taken = 0, []
    while not body.complete:
        view = body.get_buffer(-1)
        count = min(size, len(view), len(DATA) - at)
        assert count, "there is room whenever something comes"
        view[:count] = DATA[at : at + count]
        at += count
        body.buffer_updated(count)
        if body._is_due():
            taken.append(bytes(body.take()))
    return taken


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize("size", [1, 3, 1000, 1 << 16])
def test_every_byte_is_taken_once_and_in_order(size: int, in_one_piece: bool) -> None:
    body = BodyReceiver(len(DATA), UploadMemory(len(DATA) if in_one_piece else 1))
    assert (body.whole is not None) is in_one_piece
    taken = received(body, size)
    assert b"".join(taken) == DATA
    assert all(len(data) % ALIGNED == 0 for data in taken[:-1]), "a float is never cut in two"
    assert len(taken) <= 1 + len(DATA) // (PIECE - ALIGNED)
    if body.whole is not None:
        assert body.whole == DATA


def test_memory_for_whole_updates_is_bounded_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_receiver, "WHOLE_BYTES_MAX", 4 * 1000)
    memory = UploadMemory(1000)
    held = [memory.whole(1000) for _ in range(5)]
    assert [view is not None for view in held] == [True, True, True, True, False]
    assert memory.whole(999) is None
    part = held[0][100:] if held[0] is not None else None  # whatever refers to a part of it keeps all of it
    held[0] = None
    assert memory.whole(1000) is None
    del part
    assert memory.whole(1000) is not None


def test_a_model_that_is_too_large_is_received_in_pieces() -> None:
    most = body_receiver.WHOLE_BYTES_MAX // body_receiver.WHOLE_MIN
    assert UploadMemory(most).whole(most) is not None
    assert UploadMemory(most + 1).whole(most + 1) is None
