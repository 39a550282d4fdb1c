"""Who is on duty: hosts join, drain, are started again and go, as a source and their hellos say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from fake_mesh import HEALTH, FakeHost

from cartridge_forge.plugins.cluster.hosts import membership as roster_module
from cartridge_forge.plugins.cluster.hosts.addressed import AddressedHosts
from cartridge_forge.plugins.cluster.hosts.handshake import WorkerInfo, WorkerInfoServer
from cartridge_forge.plugins.cluster.hosts.membership import HostMembership
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool import process as process_module
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.process_manager import ProcessManager

NEEDED = {"torchmonarch": "0.7.0"}

PATIENCE = 60.0


class Guest:
    """A worker's hello, which can be changed."""

    def __init__(self, stack: ExitStack) -> None:
        self.says = WorkerInfo(NEEDED, "first", False, "tcp://127.0.0.1:1")
        server = stack.enter_context(WorkerInfoServer("127.0.0.1", 0, lambda: self.says))
        self.address = f"tcp://127.0.0.1:{server.port - 1}"


class Source:
    """Tells of whoever is put into `answers`."""

    def __init__(self, *first: HostWorker) -> None:
        self.answers: asyncio.Queue[tuple[HostWorker, ...] | Exception] = asyncio.Queue()
        self.answers.put_nowait(first)
        self.closed = False

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        while True:
            answer = await self.answers.get()
            if isinstance(answer, Exception):
                raise answer
            yield answer

    async def want(self, role: str, replicas: int) -> None: ...

    def lacking(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None:
        self.closed = True


class Duty:
    """A roster over a source, and what came of it."""

    def __init__(self, source: Any) -> None:
        self.notes: list[tuple[str, str]] = []
        self.said: list[dict[str, Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.processes = ProcessManager(HEALTH, timeout_s=5.0)
        self.roster = HostMembership(source, self.processes, NEEDED, 0.2, self._note, self._begin)

    def _note(self, event: str, **facts: Any) -> None:
        self.notes.append((event, facts.get("host", "")))
        self.said.append(facts)

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def noted(self, *events: tuple[str, str]) -> None:
        await until(lambda: len(self.notes) >= len(events))
        assert self.notes == list(events)

    async def end(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.processes.stop()


async def until(so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def guests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Guest]]:
    async def attach(address: str) -> FakeHost:
        return FakeHost(start_s=0.0)

    # What a fake host spawns are its heartbeats' calls already, without an actor.
    monkeypatch.setattr(process_module, "HeartbeatHandle", lambda calls: calls)
    monkeypatch.setattr(roster_module, "attach", attach)
    monkeypatch.setattr(roster_module, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(roster_module, "FIRST_SECONDS", 0.1)
    with ExitStack() as stack:
        yield lambda: Guest(stack)


def test_hosts_follow_the_source_and_a_new_address_is_a_new_host(
    guests: Callable[[], Guest],
) -> None:
    async def scenario() -> None:
        first, second, third = guests(), guests(), guests()
        source = Source(HostWorker("g0", first.address, "generator", 1))
        duty = Duty(source)
        await duty.roster.open()
        assert (await duty.processes.take("g", 1, role="generator")).host == "g0"
        both = (
            HostWorker("g0", second.address, "generator", 1),
            HostWorker("g1", third.address, "generator", 1),
        )
        source.answers.put_nowait(both)
        taken = [await duty.processes.take("g", 1, role="generator") for _ in range(2)]
        assert {p.host for p in taken} == {"g0", "g1"}
        await until(lambda: len(duty.processes.leaving()) == 1)  # on the pod that was replaced
        ranks = {p.host: duty.processes.rank(p) for p in taken}
        assert ranks["g0"] < ranks["g1"]
        await duty.end()

    asyncio.run(scenario())


def test_another_version_is_refused_at_first_and_later(guests: Callable[[], Guest]) -> None:
    async def scenario() -> None:
        good, bad = guests(), guests()
        bad.says = replace(bad.says, versions={"torchmonarch": "0.6.9"})
        duty = Duty(AddressedHosts([good.address, bad.address]))
        with pytest.raises(RunError, match=f"{bad.address} has torchmonarch 0.6.9"):
            await duty.roster.open()
        await duty.end()

        source = Source(HostWorker("good", good.address))
        duty = Duty(source)
        await duty.roster.open()
        source.answers.put_nowait(
            (HostWorker("good", good.address), HostWorker("bad", bad.address))
        )
        await duty.noted(("host_joined", "good"), ("host_refused", "bad"))
        await asyncio.sleep(0.2)
        assert len(duty.notes) == 2, "said once"
        bad.says = replace(bad.says, versions=NEEDED)
        await duty.noted(("host_joined", "good"), ("host_refused", "bad"), ("host_joined", "bad"))
        await duty.end()

    asyncio.run(scenario())


def test_a_source_that_fails_is_noted_once_and_asked_again(guests: Callable[[], Guest]) -> None:
    async def scenario() -> None:
        guest, later = guests(), guests()
        source = Source(HostWorker("a", guest.address))
        duty = Duty(source)
        await duty.roster.open()
        for _ in range(3):
            source.answers.put_nowait(RunError("no rights to list pods; grant them"))
        source.answers.put_nowait((HostWorker("a", guest.address), HostWorker("b", later.address)))
        await duty.noted(("host_joined", "a"), ("failed", ""), ("host_joined", "b"))
        await duty.roster.close()
        assert source.closed
        await duty.end()

    asyncio.run(scenario())


def test_a_worker_that_drains_is_left_and_used_again_once_started_again(
    guests: Callable[[], Guest],
) -> None:
    async def scenario() -> None:
        guest = guests()
        duty = Duty(AddressedHosts([guest.address]))
        await duty.roster.open()
        name = guest.address.removeprefix("tcp://")
        process = await duty.processes.take("generator", 1, role="generator")
        guest.says = replace(guest.says, draining=True)
        await until(lambda: bool(duty.processes.leaving()))
        await duty.noted(("host_joined", name))
        await duty.processes.discard(process)
        await duty.noted(("host_joined", name), ("host_drained", name))
        guest.says = replace(guest.says, draining=False, incarnation="second")
        await duty.noted(("host_joined", name), ("host_drained", name), ("host_joined", name))
        await duty.end()

    asyncio.run(scenario())


def test_one_that_was_started_again_is_another_host(guests: Callable[[], Guest]) -> None:
    async def scenario() -> None:
        guest = guests()
        duty = Duty(AddressedHosts([guest.address]))
        await duty.roster.open()
        name = guest.address.removeprefix("tcp://")
        guest.says = replace(guest.says, incarnation="second")
        await duty.noted(("host_joined", name), ("host_lost", name), ("host_joined", name))
        assert duty.said[1]["reason"] == "it was started again"
        await duty.end()

    asyncio.run(scenario())


def test_one_that_does_not_answer_at_first_is_an_error() -> None:
    async def scenario() -> None:
        duty = Duty(AddressedHosts(["tcp://127.0.0.1:1"]))
        with pytest.raises(RunError, match="said no hello on port 2"):
            await duty.roster.open()
        await duty.end()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(roster_module, "POLL_SECONDS", 0.02)
        patched.setattr(roster_module, "FIRST_SECONDS", 0.1)
        asyncio.run(scenario())
