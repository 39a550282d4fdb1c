"""One relay a remote host: started, replaced, and ended with its host."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from cartridge_forge.plugins.cluster.relays.host_relays import HostRelays, listened_at
from cartridge_forge.plugins.cluster.relays.relay import RelayPlace
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.hosts import HostWorker

HEALTH = HealthSpec(heartbeat_s=0.01, suspect_after_s=0.1, dead_after_s=0.3)


class Handle:
    def __init__(self, place: RelayPlace) -> None:
        self.place = place
        self.start = self

    async def call_one(self) -> RelayPlace:
        return self.place


@dataclass(eq=False)
class FakeProcess:
    name: str
    answers: bool = True
    ended: bool = False
    gone: int = 0
    procs: Any = None

    def __post_init__(self) -> None:
        self.procs = self

    def spawn(self, name: str, actor: type, host: str, at: str, secured: bool) -> Handle:
        scheme = "tls" if secured else "tcp"
        return Handle(RelayPlace(host, f"{scheme}://{at}:{self.name.removeprefix('relayx')}", "/r"))

    @property
    def silent_s(self) -> float:
        return 0.0 if self.answers else 60.0

    def ended_pid(self) -> int:
        return self.gone

    async def beat(self) -> int:
        return 1

    async def end(self) -> None:
        self.ended = True


@dataclass(eq=False)
class FakeHost:
    worker: HostWorker
    well: bool = True
    broken: bool = False
    processes: list[object] = field(default_factory=list)
    beside: list[object] = field(default_factory=list)
    relays: list[FakeProcess] = field(default_factory=list)

    @property
    def label(self) -> str:
        return self.worker.name

    def spawn_beside(self, name: str, *of: object) -> FakeProcess:
        if self.broken:
            raise RunError("nothing starts here")
        self.relays.append(FakeProcess(name))
        return self.relays[-1]


class Told:
    """What the planes were told last, and how often."""

    def __init__(self, hosts: list[FakeHost]) -> None:
        self.hosts, self.times = hosts, 0
        self.places: tuple[RelayPlace, ...] = ()
        self.news = asyncio.Event()
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.relays = HostRelays(
            lambda: self.hosts, HEALTH, 5.0, self.changed, self.note  # type: ignore[arg-type,return-value]
        )  # fmt: skip

    def note(self, event: str, **facts: Any) -> None:
        self.notes.append((event, facts))

    async def changed(self) -> None:
        self.times += 1
        self.places = self.relays.places
        self.news.set()

    async def until(self, names: list[str]) -> None:
        async with asyncio.timeout(10.0):
            while [place.host for place in self.places] != names:
                self.news.clear()
                await self.news.wait()


def host(name: str, address: str | None = None) -> FakeHost:
    return FakeHost(HostWorker(name, f"tcp://{name}:26600" if address is None else address))


def test_every_host_with_an_address_has_one_and_all_are_told_once() -> None:
    async def scenario() -> None:
        tls = host("c", "tls://c.lan:26600")
        told = Told([host("a"), host("slurm", ""), tls])
        await told.relays.open()
        assert [place.host for place in told.places] == ["a", "c"]
        assert told.places[1].address.startswith("tls://c.lan:")
        assert told.times == 1
        await told.relays.stop()
        assert all(relay.ended for one in told.hosts for relay in one.relays)

    asyncio.run(scenario())


def test_one_that_is_silent_is_replaced_and_hosts_come_and_go() -> None:
    async def scenario() -> None:
        a, b = host("a"), host("b")
        told = Told([a])
        await told.relays.open()
        told.hosts.append(b)
        await told.until(["a", "b"])
        a.relays[0].answers = False
        await told.until(["b", "a"])
        assert [relay.ended for relay in a.relays] == [True, False]
        [(lost, of), (back, by)] = told.notes
        assert (lost, of) == ("relay_lost", {"host": "a", "reason": "it was silent for 0.3 s"})
        assert (back, by["host"]) == ("relay_back", "a")
        assert (a.beside, b.beside) == ([a.relays[1]], b.relays), "they are asked for heartbeats"
        a.relays[1].gone = 4711
        told.news.clear()
        await told.news.wait()
        await told.until(["b", "a"])
        assert [relay.ended for relay in a.relays] == [True, True, False]
        assert told.notes[2] == (
            "relay_lost", {"host": "a", "reason": "its process 4711 has ended"}
        )  # fmt: skip
        # A host that is left keeps its relay for as long as it has processes.
        b.processes.append("a trainer that ends its step")
        told.hosts.remove(b)
        await asyncio.sleep(0.1)
        assert not b.relays[0].ended
        b.processes.clear()
        await told.until(["a"])
        assert b.relays[0].ended
        assert len(told.notes) == 4, "one that ends with its host is not lost"
        await told.relays.stop()

    asyncio.run(scenario())


def test_a_host_on_which_none_starts_is_used_without() -> None:
    async def scenario() -> None:
        a, b = host("a"), host("b")
        a.broken, b.well = True, False
        told = Told([a, b])
        await told.relays.open()
        assert told.places == ()
        b.well = True
        await told.until(["b"])
        await told.relays.stop()

    asyncio.run(scenario())


def test_a_relay_listens_at_its_name_or_everywhere() -> None:
    assert listened_at("127.0.0.1") == "127.0.0.1"
    assert listened_at("192.0.2.7") == "0.0.0.0", "another host's address"
