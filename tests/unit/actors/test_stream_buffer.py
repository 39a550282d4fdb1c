"""Tokens of a stream: the first at once, those after them together."""

from __future__ import annotations

import asyncio

import pytest

from actors import engine_generator
from actors.engine_generator import AT_ONCE, StreamBuffer
from protocols.types import TokenChunk


class FakePort:
    def __init__(self) -> None:
        self.sent: list[list[int]] = []

    def send(self, chunks: list[TokenChunk]) -> None:
        self.sent.append([chunk.first for chunk in chunks])


def chunk(at: int) -> TokenChunk:
    return TokenChunk("r", at, (at,), (-1.0,))


def test_the_first_tokens_are_sent_as_they_come_and_later_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 60.0)
    port = FakePort()

    async def run() -> None:
        buffer = StreamBuffer(port)
        for at in range(AT_ONCE + 3):
            buffer.add(chunk(at))
            for _ in range(3):  # to the loop, to its timer, and to the port
                await asyncio.sleep(0)
        assert port.sent == [[at] for at in range(AT_ONCE)]
        buffer.flush()
        buffer.flush()

    asyncio.run(run())
    later = list(range(AT_ONCE, AT_ONCE + 3))
    assert port.sent == [*([at] for at in range(AT_ONCE)), later], "and nothing is sent twice"


def test_what_was_collected_is_sent_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_generator, "AT_ONCE", 1)
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 0.05)
    port = FakePort()

    async def sends(count: int) -> None:
        async with asyncio.timeout(20):
            while len(port.sent) < count:  # noqa: ASYNC110  a port tells nobody
                await asyncio.sleep(0.001)

    async def run() -> None:
        buffer = StreamBuffer(port)
        buffer.add(chunk(0))
        await sends(1)
        buffer.add(chunk(1))
        buffer.add(chunk(2))
        await sends(2)

    asyncio.run(run())
    assert port.sent == [[0], [1, 2]]
