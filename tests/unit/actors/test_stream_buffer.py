"""Tokens of a stream: a step that begins a response is sent at once, later ones together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from cartridge_forge.actors import engine_generator
from cartridge_forge.actors.engine_generator import StreamBuffer
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling
from cartridge_forge.protocols.streams import TokenChunk

Sent = list[list[tuple[str, int, tuple[int, ...]]]]


class FakePort:
    def __init__(self) -> None:
        self.sent: Sent = []

    def send(self, chunks: list[TokenChunk]) -> None:
        self.sent.append([(c.request_id, c.first, c.token_ids) for c in chunks])


def chunk(at: int, request: str = "r") -> TokenChunk:
    return TokenChunk(request, at, (at,), (-1.0,))


async def passed() -> None:
    """Let the event loop run what it was told of."""
    for _ in range(3):
        await asyncio.sleep(0)


def sent_by(steps: Callable[[StreamBuffer, FakePort], Awaitable[None]]) -> Sent:
    port = FakePort()

    async def run() -> None:
        await steps(StreamBuffer(port), port)

    asyncio.run(run())
    return port.sent


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_later_tokens_wait_for_the_next_response_that_begins() -> None:
    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0)])
        await passed()
        assert port.sent == [[("r", 0, (0,))]]
        buffer.add([chunk(1)])
        buffer.add([chunk(2)])
        await passed()
        assert len(port.sent) == 1
        buffer.add([chunk(3), chunk(0, "other")])
        await passed()

    assert sent_by(steps)[1:] == [[("r", 1, (1, 2, 3)), ("other", 0, (0,))]]


def test_later_tokens_are_sent_with_the_first_step_after_the_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_generator, "TELL_SECONDS", 0.01)

    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0)])
        await passed()
        buffer.add([chunk(1)])
        await asyncio.sleep(0.02)
        buffer.add([chunk(2)])
        await passed()

    sent = sent_by(steps)
    assert [token for message in sent for _, _, ids in message for token in ids] == [0, 1, 2]
    assert sent[-1][0][2][-1] == 2


@pytest.mark.usefixtures("patient")
def test_what_is_left_of_an_ended_request_is_not_sent() -> None:
    ended = GenerateRequest("r", (1,), PrefixRef("document/", 0), Sampling(), 0)

    async def steps(buffer: StreamBuffer, port: FakePort) -> None:
        buffer.add([chunk(0), chunk(0, "other")])
        await passed()
        buffer.add([chunk(1), chunk(1, "other")])
        buffer.end([ended])
        buffer.add([chunk(0, "third")])
        await passed()

    assert sent_by(steps)[1:] == [[("other", 1, (1,)), ("third", 0, (0,))]]
