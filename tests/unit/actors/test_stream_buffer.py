"""Tokens of a stream: the first at once, those after them together."""

from __future__ import annotations

import asyncio

import pytest

from actors import engine_generator
from actors.engine_generator import StreamBuffer
from protocols.types import TokenChunk


class FakePort:
    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def send(self, chunks: list[TokenChunk]) -> None:
        self.sent.append([chunk.first for chunk in chunks])


def chunk(at: int) -> TokenChunk:
    return TokenChunk("r", at, (at,), (-1.0,))


async def sends(port: FakePort, count: int) -> None:
    async with asyncio.timeout(20):
        while len(port.sent) < count:  # noqa: ASYNC110  a port tells nobody
            await asyncio.sleep(0.001)


async def started(port: FakePort) -> StreamBuffer:
    """A buffer that has sent its first token."""
    buffer = StreamBuffer(port)
    buffer.add(chunk(0))
    await sends(port, 1)
    assert port.sent == [[0]]
    return buffer


def test_the_first_token_is_sent_as_it_comes_and_later_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 0.05)
    port = FakePort()

    async def run() -> None:
        buffer = await started(port)
        buffer.add(chunk(1))
        buffer.add(chunk(2))
        await sends(port, 2)

    asyncio.run(run())
    assert port.sent == [[0], [1, 2]]


def test_the_end_of_a_call_sends_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 60.0)
    port = FakePort()

    async def run() -> None:
        buffer = await started(port)
        buffer.add(chunk(1))
        await asyncio.sleep(0.01)
        assert port.sent == [[0]]
        buffer.flush()
        buffer.flush()

    asyncio.run(run())
    assert port.sent == [[0], [1]], "and nothing is sent twice"
