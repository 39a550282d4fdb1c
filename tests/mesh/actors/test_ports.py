"""Calls over ports between real processes: one that reaches nobody ends nobody."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from cartridge_forge.actors.heartbeat import HeartbeatActor, HeartbeatHandle, PortCall, open_port
from cartridge_forge.plugins.cluster.hosts.host_beats import HostBeatsActor, WatchedProcess

SECONDS = 60.0
PERIOD_S = 2.0


class Answerer(Actor):
    """Answers over a port, the second question late."""

    def __init__(self) -> None:
        self.second = asyncio.Event()

    @concurrent_endpoint
    async def listen(self, method: str) -> Any:
        return open_port(getattr(self, method))

    async def square(self, number: int) -> int:
        if number < 0:
            raise ValueError(f"{number} is below 0")
        return number * number

    async def last(self) -> str:
        await self.second.wait()
        return "the first"

    async def release(self) -> None:
        self.second.set()


class Caller(Actor):
    """Asks a heartbeat actor, and one that asks it for its host, before and after it is stopped."""

    def __supervise__(self, failure: Any) -> bool:
        return True

    @concurrent_endpoint
    async def ask(self, how: str) -> dict[str, Any]:
        host = this_host()
        procs = host.spawn_procs(per_host={"procs": 1}, name=f"asked{how}")
        speaking = host.spawn_procs(per_host={"procs": 1}, name=f"speaks{how}")
        actor = procs.spawn("asked", HeartbeatActor, None)
        handle = HeartbeatHandle(actor)
        speaker = HeartbeatHandle(speaking.spawn("speaks", HostBeatsActor, None))
        beat = await handle.beat.call_one()
        process = {"p": WatchedProcess((handle.beat,), (beat.pid,))}
        before = await speaker.beat_host.call_one(("p",), process, PERIOD_S)
        if how == "actor":
            await actor.stop()
        elif how == "process":
            await procs.stop()
        else:
            os.kill(beat.pid, signal.SIGKILL)
        told = before
        for _ in range(3):
            told = await speaker.beat_host.call_one(("p",), {}, PERIOD_S)
        said = await asyncio.gather(*(reply(handle.beat) for _ in range(3)))
        await speaking.stop()
        return {
            "before": [b.pid == beat.pid for b in before["p"].beats], "said": list(said),
            "older": told["p"].age_s > before["p"].age_s or bool(told["p"].ended),
        }  # fmt: skip

    @concurrent_endpoint
    async def lives(self) -> bool:
        return True


async def reply(call: PortCall) -> str:
    try:
        async with asyncio.timeout(PERIOD_S):
            return f"a reply: {await call.call_one()}"
    except TimeoutError:
        return "no reply"


@pytest.mark.parametrize("how", ["actor", "process", "killed"])
def test_whoever_asks_one_that_is_no_more_goes_on(how: str) -> None:
    """An endpoint call to an actor that was stopped ends its caller in Monarch 0.7."""

    async def scenario() -> tuple[dict[str, Any], bool]:
        procs = this_host().spawn_procs(per_host={"procs": 1}, name=f"asks{how}")
        caller = procs.spawn("asks", Caller)
        async with asyncio.timeout(SECONDS):
            said = await caller.ask.call_one(how)
            lives = await caller.lives.call_one()
            await procs.stop()
        return said, lives

    assert asyncio.run(scenario()) == (
        {"before": [True], "said": ["no reply"] * 3, "older": True}, True,
    )  # fmt: skip


def test_calls_over_a_port_are_served_at_once_and_raise_what_the_method_raises() -> None:
    async def scenario() -> None:
        procs = this_host().spawn_procs(per_host={"procs": 1}, name="answers")
        actor = procs.spawn("answers", Answerer)
        square, last = PortCall(actor, "square"), PortCall(actor, "last")
        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(*(square.call_one(n) for n in range(20))) == [
                n * n for n in range(20)
            ]
            with pytest.raises(ValueError, match="-1 is below 0"):
                await square.call_one(-1)
            waiting = asyncio.ensure_future(last.call_one())
            assert await square.call_one(3) == 9, "one that waits holds up no other"
            assert not waiting.done()
            await PortCall(actor, "release").call_one()
            assert await waiting == "the first"
            await procs.stop()

    asyncio.run(scenario())
