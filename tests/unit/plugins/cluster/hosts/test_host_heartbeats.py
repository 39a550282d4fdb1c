"""Test heartbeats of hosts, on both sides."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import HEALTH, FakeHost, run

from cartridge_forge.actors.heartbeat import Heartbeat
from cartridge_forge.plugins.cluster.hosts.host_heartbeats import (
    HeartbeatPlan,
    HostAsk,
    HostBeats,
    ProcessBeat,
    WatchedProcess,
)
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.process import ReplicaProcess
from cartridge_forge.services.pool.process_manager import ProcessManager


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


# A heartbeat every 0.5 s, suspicion after 2 s: a speaker has (2 - 0.5) / 2 = 0.75 s.


def process(name: str, last_beat: float = 10.0, handle: Any = None) -> ReplicaProcess:
    procs: Any = None
    found = ReplicaProcess(name, "w1", procs, [handle], local=False, last_beat=last_beat)
    found.pids = (100,)
    return found


def beat(age_s: float, pid: int = 100) -> ProcessBeat:
    return ProcessBeat((Heartbeat(pid, 4096, 3),), age_s)


def names(processes: Sequence[ReplicaProcess]) -> list[str]:
    return [p.name for p in processes]


def plan(speaker: ReplicaProcess | None = None) -> HeartbeatPlan:
    found = HeartbeatPlan(HEALTH)
    found.use(speaker)
    return found


def test_without_a_speaker_each_is_asked_and_two_that_answer_get_one() -> None:
    host, a, b = plan(), process("a"), process("b", last_beat=9.0)
    assert host.ask([a, b], 10.1) == HostAsk(single=(a, b))
    assert [host.wants_speaker(of, 10.1) for of in ([], [a], [a, b])] == [False, False, True]
    assert not host.wants_speaker([a, b], 11.0), "neither has answered within two periods"
    speaker = process("s")
    host.use(speaker)
    assert not host.wants_speaker([a, b], 10.1)
    assert host.ask([a, b], 10.6) == HostAsk(speaker, ("a", "b"), added=(a, b))


def test_processes_are_described_until_the_speaker_tells_of_them() -> None:
    speaker, a, b, c = process("s"), process("a"), process("b"), process("c")
    host = plan(speaker)
    assert names(host.ask([a, b], 10.0).added) == ["a", "b"]
    assert names(host.ask([a, b], 10.5).added) == ["a", "b"], "nothing was heard yet"
    host.heard(speaker, {"a": beat(0.0), "b": beat(0.0)}, [a, b], 10.6)
    assert host.ask([a, b, c], 11.0) == HostAsk(speaker, ("a", "b", "c"), added=(c,))
    host.heard(speaker, {"a": beat(0.0), "b": beat(0.0), "c": ProcessBeat()}, [a, b, c], 11.1)
    assert host.ask([a, c], 11.5) == HostAsk(speaker, ("a", "c"))


def test_a_reply_says_when_each_answered_and_nothing_of_one_that_still_starts() -> None:
    speaker, a, b, c = process("s"), process("a"), process("b"), process("c")
    host = plan(speaker)
    told = {"a": beat(0.0), "b": beat(1.5, 101), "c": ProcessBeat()}
    host.heard(speaker, told, [a, b, c], 12.0)
    assert [p.last_beat for p in (a, b, c)] == [12.0, 10.5, 10.0]
    assert (b.pids, b.memory_bytes, b.work) == ((101,), 4096, 3)
    # An older answer that overtakes a newer one changes nothing.
    host.heard(speaker, {"a": beat(3.0)}, [a, b, c], 12.5)
    assert a.last_beat == 12.0


def test_an_end_is_told_once_and_before_anybody_watches_too() -> None:
    async def scenario() -> None:
        speaker, a, b = process("s"), process("a"), process("b")
        host = plan(speaker)
        seen: list[tuple[str, int]] = []
        a.watch(lambda pid: seen.append(("a", pid)))
        reply = {"a": ProcessBeat(ended=100), "b": ProcessBeat(ended=200)}
        for now in (10.1, 10.6):
            host.heard(speaker, reply, [a, b], now)
        assert seen == [("a", 100)]
        b.watch(lambda pid: seen.append(("b", pid)))
        await asyncio.sleep(0)
        assert seen == [("a", 100), ("b", 200)]
        assert (a.ended_pid(), b.ended_pid()) == (100, 200)

    run(scenario())


def test_without_a_reply_all_are_asked_before_any_is_suspect() -> None:
    speaker, a, b = process("s"), process("a"), process("b")
    host = plan(speaker)
    asked = [host.ask([a, b], 10.0 + 0.5 * i) for i in range(5)]
    assert all(ask.speaker is speaker for ask in asked), "it may be the link, and come back"
    # From 1.0 s after the first: the processes have 2 - 1 s left.
    assert [names(ask.single) for ask in asked] == [[], [], ["a", "b"], ["a", "b"], ["a", "b"]]
    host.heard(speaker, {"a": beat(0.2), "b": beat(0.2)}, [a, b], 12.4)
    assert host.ask([a, b], 12.5) == HostAsk(speaker, ("a", "b"))


def test_what_a_former_speaker_says_is_no_reply_of_the_present_one() -> None:
    first, second, a, b = process("s"), process("t"), process("a"), process("b")
    host = plan(first)
    host.ask([a, b], 10.0)
    host.use(second)
    host.heard(first, {"a": beat(0.25), "b": beat(0.25)}, [a, b], 10.75)
    assert (a.last_beat, b.last_beat) == (10.5, 10.5)
    assert host.ask([a, b], 11.0) == HostAsk(second, ("a", "b"), added=(a, b))


class Asker:
    """A heartbeat actor: counts what it is asked, for itself and for its host. `broken` is what a
    call of it raises."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []
        self.beat = SimpleNamespace(call_one=self._beat)
        self.beat_host = SimpleNamespace(choose=self._beat_host)
        self.host: dict[str, WatchedProcess] = {}
        self.broken: Exception | None = None
        self.ended = False

    async def _beat(self) -> Heartbeat:
        self.asked.append(())
        return Heartbeat(100, 1)

    async def _beat_host(
        self, named: tuple[str, ...], added: dict[str, WatchedProcess], period_s: float
    ) -> dict[str, ProcessBeat]:
        assert period_s == 0.5
        if self.broken:
            raise self.broken
        self.asked.append(named)
        self.host |= added
        return {name: ProcessBeat((Heartbeat(100, 1),)) for name in named if name in self.host}

    async def stop(self) -> None:
        self.ended = True


class Mesh(FakeHost):
    """A host whose processes are `Asker`s."""

    def __init__(self) -> None:
        super().__init__()
        self.askers: dict[str, Asker] = {}

    def spawn_procs(self, *, name: str, **_: Any) -> Any:
        asker = self.askers[name] = Asker()
        return SimpleNamespace(spawn=lambda *_: asker, stop=asker.stop)

    @property
    def speakers(self) -> list[Asker]:
        return [asker for name, asker in self.askers.items() if name.startswith("hostbeats")]

    def asked(self) -> dict[str, int]:
        """How often each of the others was asked."""
        others = {n: a for n, a in self.askers.items() if a not in self.speakers}
        return {name: len(asker.asked) for name, asker in others.items()}


async def periods(manager: ProcessManager, count: int) -> None:
    for _ in range(count):
        manager.mind()
        await asyncio.sleep(HEALTH.heartbeat_s)


def test_a_host_gets_one_message_a_period_for_replicas_spares_and_relay() -> None:
    async def scenario() -> None:
        mesh = Mesh()
        manager = ProcessManager(HEALTH, spares=1, timeout_s=20.0)
        host = manager.join(HostWorker("w1", "tcp://w:1"), mesh)  # type: ignore[arg-type]
        for _ in range(3):
            await manager.take("generator", 1)
        relay = Asker()
        host.beside.append(process("relay", last_beat=time.monotonic(), handle=relay))
        manager.keep_spares()
        await periods(manager, 2)  # one by one, and a speaker starts
        before = mesh.asked()
        await periods(manager, 4)
        (speaker,) = mesh.speakers
        everyone = ("relay", *(p.name for p in host.processes))
        assert len(everyone) == 5
        assert speaker.asked[-4:] == [everyone] * 4
        assert set(speaker.host) == set(everyone)
        assert mesh.asked() == before, "no process was asked from here"
        assert max(p.silent_s for p in host.processes) <= 0.5
        # One that is being ended is asked no more.
        host.processes[0].ending = True
        await periods(manager, 1)
        assert speaker.asked[-1] == ("relay", *everyone[2:])
        await manager.stop()
        assert speaker.ended

    run(scenario())


def test_a_speaker_that_fails_is_replaced_and_nobody_is_lost_meanwhile() -> None:
    async def scenario() -> None:
        mesh = Mesh()
        manager = ProcessManager(HEALTH, timeout_s=20.0)
        host = manager.join(HostWorker("w1", "tcp://w:1"), mesh)  # type: ignore[arg-type]
        for _ in range(2):
            await manager.take("generator", 1)
        await periods(manager, 4)
        mesh.speakers[0].broken = RuntimeError("the actor has stopped")
        before = mesh.asked()
        await periods(manager, 4)
        assert mesh.speakers[0].ended
        # The first period's message went to the speaker, three to each process.
        assert mesh.asked() == {name: count + 3 for name, count in before.items()}
        assert max(p.silent_s for p in host.processes) <= 0.5
        await periods(manager, 12)
        assert len(mesh.speakers) == 2, "5 s later"
        assert mesh.speakers[1].asked[-1] == tuple(p.name for p in host.processes)
        await manager.stop()

    run(scenario())


def test_the_speaker_ends_with_the_last_process_of_a_host_that_is_left() -> None:
    async def scenario() -> None:
        mesh = Mesh()
        manager = ProcessManager(HEALTH, timeout_s=20.0)
        host = manager.join(HostWorker("w1", "tcp://w:1"), mesh)  # type: ignore[arg-type]
        taken = [await manager.take("generator", 1) for _ in range(2)]
        await periods(manager, 4)
        manager.leave(host)
        left = asyncio.create_task(manager.left(host))
        await manager.discard(taken[0])
        await periods(manager, 2)
        (speaker,) = mesh.speakers
        assert speaker.asked[-1] == (taken[1].name,), "as long as it drains, it is asked"
        assert not speaker.ended
        await manager.discard(taken[1])
        await left
        await asyncio.sleep(1.0)
        assert speaker.ended
        await manager.stop()

    run(scenario())
