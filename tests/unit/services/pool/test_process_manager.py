"""Processes over hosts that come and go: by role, by capacity, and what is waited for."""

from __future__ import annotations

import asyncio
import time

import pytest
from fake_mesh import HEALTH, FakeHost, run

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.process import ProcessHost, ReplicaProcess
from cartridge_forge.services.pool.process_manager import ProcessManager


def of(
    *workers: tuple[str, str, int], spares: int = 0
) -> tuple[ProcessManager, dict[str, ProcessHost]]:
    """Processes over workers, each (name, role, capacity)."""
    processes = ProcessManager(HEALTH, spares=spares, timeout_s=20.0)
    return processes, {w[0]: join(processes, *w) for w in workers}


def join(processes: ProcessManager, name: str, role: str = "", capacity: int = 0) -> ProcessHost:
    return processes.join(HostWorker(name, "tcp://w:1", role, capacity), FakeHost())  # type: ignore[arg-type]


async def hosts_of(processes: ProcessManager, role: str, count: int) -> list[str]:
    return [(await processes.take(role, 1, role=role)).host for _ in range(count)]


def test_a_role_s_processes_are_on_its_own_workers() -> None:
    async def scenario() -> None:
        processes, _ = of(("g0", "generator", 1), ("g1", "generator", 1), ("t0", "trainer", 1))
        assert await hosts_of(processes, "generator", 2) == ["g0", "g1"]
        assert await hosts_of(processes, "trainer", 1) == ["t0"]
        await processes.stop()

    run(scenario())


def test_beyond_capacity_one_waits_for_a_worker_and_takes_it_when_it_joins() -> None:
    async def scenario() -> None:
        processes, _ = of(("g0", "generator", 1))
        await processes.take("generator", 1, role="generator")
        second = asyncio.create_task(processes.take("generator", 1, role="generator"))
        await asyncio.sleep(5.0)
        assert not second.done()
        join(processes, "t0", "trainer", 1)
        await asyncio.sleep(1.0)
        assert not second.done(), "a trainer's worker is none of its"
        join(processes, "g1", "generator", 1)
        assert (await second).host == "g1"
        await processes.stop()

    run(scenario())


def test_or_the_place_of_one_that_is_discarded() -> None:
    async def scenario() -> None:
        processes, _ = of(("g0", "generator", 1))
        first = await processes.take("generator", 1, role="generator")
        second = asyncio.create_task(processes.take("generator", 1, role="generator"))
        await asyncio.sleep(1.0)
        assert not second.done()
        await processes.discard(first)
        assert (await second).host == "g0"
        await processes.stop()

    run(scenario())


def test_a_name_of_a_process_is_never_used_again_by_another_mesh() -> None:
    """Monarch reports a death seconds later, by the name alone: the report of one mesh's generator
    must not end the generator of the next."""

    async def scenario() -> None:
        names = []
        for _ in range(2):
            processes, _ = of(("g0", "generator", 2))
            for _ in range(2):
                names.append((await processes.take("generator", 1, role="generator")).name)
            await processes.stop()
        assert len(set(names)) == 4

    run(scenario())


def test_a_worker_that_never_comes_is_what_the_error_names() -> None:
    async def scenario() -> None:
        processes, _ = of(("g0", "generator", 1))
        await processes.take("generator", 1, role="generator")
        begun = time.monotonic()
        with pytest.raises(
            RunError, match=r"within 20 s; 1 worker takes generator: 1 full, 0 silent; .* start the"
        ):
            await processes.take("generator", 1, role="generator")
        assert time.monotonic() - begun == pytest.approx(20.0)
        with pytest.raises(RunError, match="no worker takes store"):
            await processes.take("store", 1, role="store")
        await processes.stop()

    run(scenario())


def test_a_host_that_does_not_start_one_is_doubted_for_another_of_its_role() -> None:
    async def scenario() -> None:
        processes, hosts = of(("g0", "generator", 2), ("g1", "generator", 2), ("any", "", 0))
        hosts["g0"].mesh.down = True
        begun = time.monotonic()
        assert (await processes.take("generator", 1, role="generator")).host == "g1"
        assert time.monotonic() - begun == pytest.approx(5.0 + 0.1)  # a quarter of the time
        assert hosts["g0"].trial is not None
        assert hosts["any"].trial is None
        await processes.stop()

    run(scenario())


def test_what_starts_on_a_host_that_is_left_starts_elsewhere() -> None:
    async def scenario() -> None:
        processes, hosts = of(("a", "", 0))
        hosts["a"].mesh.down = True
        taking = asyncio.create_task(processes.take("generator", 1, role="generator"))
        await asyncio.sleep(1.0)
        join(processes, "b")
        processes.leave(hosts["a"])
        assert (await taking).host == "b"
        assert processes.leaving() == []
        await asyncio.wait_for(processes.left(hosts["a"]), 10.0)
        await processes.stop()

    run(scenario())


def test_a_host_is_left_once_its_last_process_is_discarded() -> None:
    async def scenario() -> None:
        processes, hosts = of(("a", "", 0), ("b", "", 0), spares=1)
        working = await processes.take("generator", 1, role="generator")
        assert working.host == "a"
        processes.keep_spares()  # on b, which has fewer
        await asyncio.sleep(1.0)
        for host in hosts.values():
            processes.leave(host)
        left = asyncio.create_task(processes.left(hosts["a"]))
        await asyncio.wait_for(processes.left(hosts["b"]), 10.0)
        assert processes.leaving() == [working], "a spare is not moved but ended"
        assert not left.done()
        await processes.discard(working)
        await asyncio.wait_for(left, 10.0)
        with pytest.raises(RunError, match="no worker takes generator"):
            await processes.take("generator", 1, role="generator")
        join(processes, "c")
        assert await hosts_of(processes, "generator", 1) == ["c"]
        await processes.stop()

    run(scenario())


def test_spares_are_for_workers_of_any_role() -> None:
    async def scenario() -> None:
        processes, hosts = of(("g0", "generator", 1), spares=2)
        processes.keep_spares()
        await asyncio.sleep(1.0)
        assert hosts["g0"].processes == []
        host = join(processes, "a")
        await asyncio.sleep(1.0)
        assert [p.name.partition("x")[0] for p in host.processes] == ["spare"] * 2
        spare = await processes.take("trainer", 1, role="trainer")
        assert spare.name.startswith("spare")
        own = await processes.take("generator", 1, role="generator")
        assert own.host == "g0", "its own worker is there for it"
        await processes.stop()

    run(scenario())


def test_devices_are_those_that_are_free_on_the_host() -> None:
    async def scenario() -> None:
        processes, hosts = of(("a", "", 0))

        async def take(slot: int) -> ReplicaProcess:
            devices = range(slot * 2, slot * 2 + 2)
            return await processes.take("generator", 1, devices, role="generator")

        first, second = await take(0), await take(5)
        assert (first.gpus, second.gpus) == ((0, 1), (2, 3))
        await processes.discard(first)
        assert (await take(7)).gpus == (0, 1)
        assert len(hosts["a"].processes) == 2
        await processes.stop()

    run(scenario())


def test_a_worker_gives_each_of_its_devices_once() -> None:
    async def scenario() -> None:
        processes = ProcessManager(HEALTH, spares=0, timeout_s=5.0)
        processes.join(HostWorker("a", "tcp://w:1", gpus=2), FakeHost())  # type: ignore[arg-type]

        async def take(gpus: int) -> ReplicaProcess:
            return await processes.take("generator", 1, range(gpus), role="generator")

        first, second = await take(1), await take(1)
        assert (first.gpus, second.gpus) == ((0,), (1,))
        with pytest.raises(RunError, match="free GPUs: 0 of 2 on a, and 1 wanted"):
            await take(1)
        await processes.discard(first)
        assert (await take(1)).gpus == (0,)
        with pytest.raises(RunError, match=r"lower roles\.generator\.gpus, or start workers"):
            await take(3)
        await processes.stop()

    run(scenario())


def test_roles_of_one_machine_share_its_devices_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cartridge_forge.services.pool.process.gpus_here", lambda: 3)

    async def scenario() -> None:
        processes = ProcessManager(HEALTH, spares=0, timeout_s=20.0)
        host = processes.join(HostWorker("a", "tcp://w:1", "", 0), FakeHost(), local=True)  # type: ignore[arg-type]
        # Each role counts its own replicas from 0.
        devices = [
            processes._spawn_on(host, name, "", 1, range(asked)).gpus
            for name, asked in (("generator", 1), ("teacher", 1), ("none", 0), ("trainer", 2))
        ]
        assert devices == [(0,), (1,), (), (2, 0)]

    run(scenario())


def test_the_rank_is_the_place_among_a_role_s_workers() -> None:
    async def scenario() -> None:
        processes, _ = of(("g1", "generator", 1), ("g0", "generator", 1), ("a", "", 0))
        processes.arrange(["g0", "g1", "a"])
        first, second = [await processes.take("g", 1, role="generator") for _ in range(2)]
        anywhere = await processes.take("trainer", 1, role="trainer")
        assert (first.host, second.host, anywhere.host) == ("g0", "g1", "a")
        assert processes.rank(first) < processes.rank(second)
        assert processes.rank(anywhere) == 0
        await processes.stop()

    run(scenario())
