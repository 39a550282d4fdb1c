"""What one process of a host tells of all: who answered when, who is silent, who has ended."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import run

from cartridge_forge.actors.heartbeat import Heartbeat
from cartridge_forge.plugins.cluster.hosts.host_beats import HostBeats, ProcessBeat, WatchedProcess


class Rank:
    """A process of this host with its heartbeat actor, which may be stopped."""

    def __init__(self, takes_s: float = 0.0) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        self.asked = 0
        self.takes_s = takes_s
        self.beat = SimpleNamespace(call_one=self._beat)

    async def _beat(self) -> Heartbeat:
        self.asked += 1
        await asyncio.sleep(self.takes_s)
        return Heartbeat(self.process.pid, 1000, 7)

    def told(self) -> Heartbeat:
        return Heartbeat(self.process.pid, 1000, 7)


def watched(*ranks: Rank) -> WatchedProcess:
    handles: Any = tuple(rank.beat for rank in ranks)
    return WatchedProcess(handles, tuple(rank.process.pid for rank in ranks))


@pytest.fixture
def ranks() -> Iterator[list[Rank]]:
    three = [Rank() for _ in range(3)]
    yield three
    for rank in three:
        rank.process.kill()
        rank.process.wait()


def test_all_ranks_of_all_processes_are_asked_and_told_of(ranks: list[Rank]) -> None:
    async def scenario() -> None:
        a, b, c = ranks
        host = HostBeats()
        reply = await host.ask(("p", "q"), {"p": watched(a), "q": watched(b, c)}, 2.0)
        assert reply == {"p": ProcessBeat((a.told(),)), "q": ProcessBeat((b.told(), c.told()))}
        # Described once, a process is known; one that is not named is watched no more.
        assert set(await host.ask(("q",), {}, 2.0)) == {"q"}
        assert [rank.asked for rank in ranks] == [1, 2, 2]
        assert set(await host.ask(("p", "q"), {}, 2.0)) == {"q"}, "p is to be described again"

    run(scenario())


def test_one_that_is_silent_delays_the_others_by_a_quarter_of_a_period(ranks: list[Rank]) -> None:
    async def scenario() -> None:
        a, b, _ = ranks
        host, both = HostBeats(), {"p": watched(a), "q": watched(b)}
        loop = asyncio.get_running_loop()
        await host.ask(("p", "q"), both, 2.0)
        b.takes_s = 1e6
        await asyncio.sleep(1.0)
        begun = loop.time()
        reply = await host.ask(("p", "q"), {}, 2.0)
        assert loop.time() - begun == pytest.approx(0.5)
        assert reply["p"].age_s == pytest.approx(0.5), "answered at once, and told 0.5 s later"
        assert reply["q"].age_s == pytest.approx(1.5)
        assert reply["q"].beats == (b.told(),)

    run(scenario())


def test_an_answer_that_comes_late_is_told_in_the_next_reply(ranks: list[Rank]) -> None:
    async def scenario() -> None:
        a = ranks[0]
        a.takes_s = 1.0
        host = HostBeats()
        assert await host.ask(("p",), {"p": watched(a)}, 2.0) == {"p": ProcessBeat()}
        await asyncio.sleep(1.5)  # 2.0 s after it was asked, 1.0 s after it answered
        reply = await host.ask(("p",), {}, 2.0)
        assert reply["p"].beats == (a.told(),)
        assert reply["p"].age_s == pytest.approx(1.5)  # and the wait of 0.5 s

    run(scenario())


def test_one_that_has_ended_is_told_of_and_asked_no_more(ranks: list[Rank]) -> None:
    async def scenario() -> None:
        a, b, c = ranks
        host = HostBeats()
        both = {"p": watched(a, b), "q": watched(c)}
        await host.ask(("p", "q"), both, 2.0)
        b.process.kill()
        b.process.wait()
        reply = await host.ask(("p", "q"), {}, 2.0)
        assert (reply["p"].ended, reply["q"].ended) == (b.process.pid, 0)
        assert a.asked == 1, "a process has ended when any of its ranks has"
        # Another speaker, which sees it for the first time, knows it too.
        other = await HostBeats().ask(("p", "q"), both, 2.0)
        assert (other["p"].ended, other["q"].ended) == (b.process.pid, 0)

    run(scenario())
