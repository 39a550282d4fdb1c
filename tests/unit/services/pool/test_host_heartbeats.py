"""Whom the heartbeats of one host go to in each period, and what its speaker's reply means."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from fake_mesh import HEALTH, FakeHost, run

from actors.heartbeat import Heartbeat
from actors.host_beats import ProcessBeat, WatchedProcess
from services.hosts.source import HostWorker
from services.pool.host_heartbeats import HostAsk, HostHeartbeats
from services.pool.process import ReplicaProcess
from services.pool.process_manager import ProcessManager

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


def test_one_process_is_asked_itself_and_of_two_one_asks_both() -> None:
    host, a, b = HostHeartbeats(HEALTH), process("a"), process("b")
    assert host.plan([], 10.0) == HostAsk()
    assert host.plan([a], 10.1) == HostAsk(single=(a,))
    assert host.plan([a, b], 10.6) == HostAsk(a, ("a", "b"), added=(a, b))


def test_processes_are_described_until_the_speaker_tells_of_them() -> None:
    host, a, b = HostHeartbeats(HEALTH), process("a"), process("b")
    first = host.plan([a, b], 10.0)
    assert names(host.plan([a, b], 10.5).added) == ["a", "b"], "nothing was heard yet"
    host.heard(first, {"a": beat(0.0), "b": beat(0.0)}, [a, b], 10.6)
    c = process("c")
    later = host.plan([a, b, c], 11.0)
    assert (later.speaker, later.names, later.added) == (a, ("a", "b", "c"), (c,))
    host.heard(later, {"a": beat(0.0), "b": beat(0.0), "c": ProcessBeat()}, [a, b, c], 11.1)
    assert host.plan([a, c], 11.5) == HostAsk(a, ("a", "c"))


def test_a_reply_says_when_each_answered_and_nothing_of_one_that_still_starts() -> None:
    host, a, b, c = HostHeartbeats(HEALTH), process("a"), process("b"), process("c")
    ask = host.plan([a, b, c], 10.0)
    host.heard(ask, {"a": beat(0.0), "b": beat(1.5, 101), "c": ProcessBeat()}, [a, b, c], 12.0)
    assert [p.last_beat for p in (a, b, c)] == [12.0, 10.5, 10.0]
    assert (b.pids, b.memory_bytes, b.work) == ((101,), 4096, 3)
    # An older answer that overtakes a newer one changes nothing.
    host.heard(ask, {"a": beat(3.0)}, [a, b, c], 12.5)
    assert a.last_beat == 12.0


def test_an_end_is_told_once_and_before_anybody_watches_too() -> None:
    async def scenario() -> None:
        host, a, b = HostHeartbeats(HEALTH), process("a"), process("b")
        seen: list[tuple[str, int]] = []
        a.watch(lambda pid: seen.append(("a", pid)))
        ask = host.plan([a, b], 10.0)
        for _ in range(2):
            reply = {"a": ProcessBeat(ended=100), "b": ProcessBeat(ended=200)}
            host.heard(ask, reply, [a, b], 10.1)
        assert seen == [("a", 100)]
        b.watch(lambda pid: seen.append(("b", pid)))
        await asyncio.sleep(0)
        assert seen == [("a", 100), ("b", 200)]
        assert (a.ended_pid(), b.ended_pid()) == (100, 200)

    run(scenario())


def test_without_a_reply_all_are_asked_before_any_is_suspect() -> None:
    host, a, b = HostHeartbeats(HEALTH), process("a"), process("b")
    asked = [host.plan([a, b], now) for now in (10.0, 10.5, 11.0)]
    assert [ask.speaker for ask in asked] == [a, a, None]
    assert asked[2].single == (a, b)  # 1.0 s after the first: the others have 2 - 1 s left
    # b answers and a does not: b speaks, and is told of a, so that it may see its end.
    b.hear((Heartbeat(101, 1),), 11.1)
    assert host.plan([a, b], 11.5) == HostAsk(b, ("a", "b"), added=(a, b))
    # What the first speaker says late is taken, but is no reply of the second.
    host.heard(asked[1], {"a": beat(0.2), "b": beat(0.2)}, [a, b], 11.6)
    assert a.last_beat == 11.6 - 0.2
    assert host.plan([a, b], 12.0).added == (a, b)


def test_with_nobody_who_answers_each_is_asked_in_every_period() -> None:
    host, a, b = HostHeartbeats(HEALTH), process("a"), process("b")
    plans = [host.plan([a, b], 10.0 + 0.5 * i) for i in range(8)]
    assert [ask.speaker for ask in plans] == [a, a, None, None, None, None, None, None]


def test_a_speaker_that_fails_or_goes_has_a_successor() -> None:
    host, a, b, c = HostHeartbeats(HEALTH), process("a"), process("b"), process("c")
    ask = host.plan([a, b, c], 10.0)
    host.failed(ask)
    assert host.plan([a, b, c], 10.5) == HostAsk(single=(a, b, c))
    for other in (b, c):
        other.hear((Heartbeat(101, 1),), 10.6)
    second = host.plan([a, b, c], 11.0)
    assert second.speaker is b, "a's last answer is two periods old"
    host.heard(second, {"b": beat(0.0), "c": beat(0.0)}, [a, b, c], 11.1)
    assert host.plan([c, a], 11.5).speaker is c, "b was ended: the next one speaks at once"


class Asker:
    """A process's heartbeat actor: counts what it is asked, itself and for its host."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: list[tuple[str, ...]] = []
        self.beat = SimpleNamespace(call_one=self._beat)
        self.beat_host = SimpleNamespace(call_one=self._beat_host)
        self.host: dict[str, WatchedProcess] = {}

    async def _beat(self) -> Heartbeat:
        self.asked.append(())
        return Heartbeat(100, 1)

    async def _beat_host(
        self, named: tuple[str, ...], added: dict[str, WatchedProcess], period_s: float
    ) -> dict[str, ProcessBeat]:
        self.asked.append(named)
        self.host |= added
        return {name: ProcessBeat((Heartbeat(100, 1),)) for name in named if name in self.host}


def test_a_host_gets_one_message_a_period_for_replicas_spares_and_relay() -> None:
    async def scenario() -> None:
        askers: list[Asker] = []
        mesh = FakeHost()

        def spawn_procs(*, name: str, **_: Any) -> Any:
            askers.append(Asker(name))
            return SimpleNamespace(spawn=lambda *_: askers[-1], stop=None)

        mesh.spawn_procs = spawn_procs  # type: ignore[method-assign]
        manager = ProcessManager(HEALTH, spares=1, timeout_s=20.0)
        host = manager.join(HostWorker("w1", "tcp://w:1"), mesh)  # type: ignore[arg-type]
        replicas = [await manager.take("generator", 1) for _ in range(3)]
        host.beside.append(process("relay", handle=Asker("relay")))
        host.beside[0].last_beat = replicas[0].last_beat
        manager.keep_spares()
        await asyncio.sleep(0.1)
        relay = host.beside[0].heartbeat
        before = [len(asker.asked) for asker in askers]
        for _ in range(4):
            manager.mind()
            await asyncio.sleep(0.5)
        assert [len(asker.asked) for asker in askers] == before, "no process was asked from here"
        everyone = ("relay", *(p.name for p in host.processes))
        assert relay.asked == [everyone] * 4
        assert set(relay.host) == set(everyone)
        assert len(everyone) == 5
        assert max(p.silent_s for p in host.processes) <= 0.5

    run(scenario())
