"""Test the processes of a pool: where they start, and how they end."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import HEALTH, FakeHost, run
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.actors.heartbeat import digest
from cartridge_forge.plugins.cluster.hosts.handshake import WorkerInfo
from cartridge_forge.plugins.cluster.hosts.membership import attached_at
from cartridge_forge.plugins.cluster.hosts.same_files import same_files
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool.hosts import HostWorker
from cartridge_forge.services.pool.process import (
    ProcessHost,
    ReplicaProcess,
    choose,
    crowded,
    lack,
    never_fits,
)
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


def process(seen: dict[str, tuple[str, bool]], local: bool = False) -> Any:
    async def look(paths: tuple[str, ...]) -> dict[str, tuple[str, bool]]:
        return {path: seen[path] for path in paths}

    heartbeat = SimpleNamespace(look=SimpleNamespace(call_one=look))
    return SimpleNamespace(host="w1", local=local, heartbeat=heartbeat)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text("mesh: {}\n")
    return str(path)


def check(spec: str, theirs: tuple[str, bool], *, written: bool, local: bool = False) -> None:
    read, write = ([], [spec]) if written else ([spec], [])
    asyncio.run(
        same_files(process({spec: theirs}, local), role="trainer", read=read, writable_paths=write)
    )


def test_the_same_file_passes(spec: str) -> None:
    check(spec, (digest(Path(spec)), True), written=True)
    check(spec, (digest(Path(spec)), False), written=False)


@pytest.mark.parametrize(("theirs", "what"), [("", "is not there"), ("0" * 64, "is another file")])
def test_a_run_directory_that_is_not_shared_is_named(spec: str, theirs: str, what: str) -> None:
    with pytest.raises(RunError) as error:
        check(spec, (theirs, True), written=True)
    assert str(error.value) == (
        f"on w1, {spec} {what}, and trainer needs it; mount the same file system at "
        f"{Path(spec).parent} on this host and on every one that may run trainer"
    )


def test_a_model_that_is_missing_is_named(spec: str) -> None:
    with pytest.raises(RunError, match=r"have the same model at .* on every host"):
        check(spec, ("", False), written=False)


def test_a_run_directory_that_is_read_only_there(spec: str) -> None:
    with pytest.raises(RunError, match="on w1, trainer may not write to"):
        check(spec, (digest(Path(spec)), False), written=True)


def test_processes_of_this_host_are_not_asked(spec: str) -> None:
    check(spec, ("", False), written=True, local=True)


def hello(address: str) -> WorkerInfo:
    return WorkerInfo({}, "a", False, address)


def test_by_the_host_that_was_reached_and_the_port_that_it_told() -> None:
    worker = HostWorker("w", "tcp://10.0.0.2:26600")
    assert attached_at(worker, hello("tcp://w2:41235")) == "tcp://10.0.0.2:41235"


def test_with_tls_by_the_name_of_the_certificate() -> None:
    worker = HostWorker("w", "tls://w2.lan:26600")
    assert attached_at(worker, hello("tls://w2.lan:41235")) == "tls://w2.lan:41235"


@pytest.mark.parametrize("told", ["tls://10.0.0.2:41235", "tcp://w2.lan:41235"])
def test_with_tls_another_name_is_refused_with_the_remedy(told: str) -> None:
    with pytest.raises(RunError, match=rf"goes by {told}; name it in hosts\.addresses as its"):
        attached_at(HostWorker("w", "tls://w2.lan:26600"), hello(told))


def host(role: str = "", capacity: int = 0, busy: int = 0, well: bool = True) -> ProcessHost:
    """A host with so many processes."""
    found = ProcessHost(HostWorker("", "", role, capacity), None, local=False)  # type: ignore[arg-type]
    found.processes = [None] * busy  # type: ignore[list-item]
    found.trial = None if well else object()  # type: ignore[assignment]
    return found


HOSTS = st.lists(
    st.builds(
        host,
        role=st.sampled_from(["", "generator", "trainer"]),
        capacity=st.integers(0, 2),
        busy=st.integers(0, 3),
        well=st.booleans(),
    ),
    max_size=6,
)
ROLES = st.sampled_from(["", "generator", "trainer", "store"])


def test_the_host_with_the_fewest_and_the_first_of_equals() -> None:
    hosts = [host(busy=2), host(busy=1), host(busy=1)]
    assert choose(hosts, "generator") is hosts[1]


def test_a_role_s_own_workers_come_before_those_of_any() -> None:
    hosts = [host(), host("generator", capacity=1), host("trainer")]
    assert choose(hosts, "generator") is hosts[1]
    assert choose(hosts, "trainer") is hosts[2]
    assert choose(hosts, "store") is hosts[0]


def test_a_full_or_doubted_one_is_passed_over() -> None:
    hosts = [host("generator", 1, busy=1), host("generator", 1, well=False)]
    assert choose(hosts, "generator") is None
    assert choose([*hosts, other := host(busy=9)], "generator") is other
    assert lack(hosts, "generator") == "2 workers take generator: 1 full, 1 silent"
    assert lack(hosts, "store") == "no worker takes store"


def test_a_spare_takes_nobody_s_place() -> None:
    assert choose([host("generator"), host("", capacity=2)], "") is None
    assert choose([host("generator"), other := host("", busy=7)], "") is other


def test_away_from_a_host() -> None:
    hosts = [host(busy=0), host(busy=5)]
    assert choose(hosts, "generator", without=hosts[0]) is hosts[1]


@given(HOSTS, ROLES)
def test_what_is_chosen_may_be(hosts: list[ProcessHost], role: str) -> None:
    chosen = choose(hosts, role)
    may = [
        h
        for h in hosts
        if h.trial is None and h.fits(role)
        and (not h.worker.capacity or len(h.processes) < h.worker.capacity)
    ]  # fmt: skip
    assert (chosen is None) == (not may)
    if chosen is not None:
        assert any(chosen is h for h in may)
        own = [h for h in may if h.worker.role == role]
        assert len(chosen.processes) == min(len(h.processes) for h in own or [chosen])


def test_two_more_than_another_of_its_role_is_crowded() -> None:
    hosts = [host(), host(), host("generator"), host("generator")]
    assert crowded(hosts, [2, 0, 1, 1]) == 0
    assert crowded(hosts, [2, 1, 3, 1]) == 2
    assert crowded(hosts, [1, 0, 1, 0]) is None
    assert crowded(hosts, [3, 3, 0, 0]) is None, "those of another role are no place for them"


def test_nobody_is_moved_to_a_full_or_doubted_host() -> None:
    assert crowded([host(), host(well=False)], [4, 0]) is None
    assert crowded([host("", 4, 4), host("", 1, 1)], [4, 0]) is None


def gpu_host(name: str, gpus: int | None, *taken: int) -> ProcessHost:
    """A worker with processes that have these devices."""
    worker = HostWorker(name, f"tcp://{name}:1", gpus=gpus)
    found = ProcessHost(worker, None, local=False)  # type: ignore[arg-type]
    found.processes = [SimpleNamespace(gpus=(device,)) for device in taken]  # type: ignore[misc]
    return found


def test_a_process_with_gpus_goes_where_the_fewest_are_left_that_suffice() -> None:
    """So that the one which asks for a whole host finds it."""
    hosts = [gpu_host("a", 8), gpu_host("b", 8)]
    assert choose(hosts, "generator", None, 4) is hosts[0]
    hosts = [gpu_host("a", 8), gpu_host("b", 8, 0, 1, 2, 3)]
    assert choose(hosts, "doc_teacher", None, 4) is hosts[1]
    assert choose(hosts, "trainer", None, 8) is hosts[0]
    assert choose(hosts, "environment") is hosts[0]  # without one: where the fewest processes are


def test_a_ninth_process_with_a_gpu_goes_to_no_host_of_eight() -> None:
    full, other = gpu_host("a", 8, *range(8)), gpu_host("b", 8, *range(7))
    assert choose([full], "generator", gpus=1) is None
    assert choose([full], "generator") is full, "one without a GPU may"
    assert choose([full, other], "generator", gpus=1) is other
    assert choose([full, other], "generator", gpus=2) is None
    assert not never_fits([full, other], "generator", 2), "a process there may end"
    assert lack([full, other], "generator", 2) == (
        "2 workers take generator: 0 full, 0 silent; free GPUs: 0 of 8 on a, 1 of 8 on b, and 2 "
        "wanted"
    )


def test_more_gpus_than_any_host_has_are_never_waited_for() -> None:
    assert never_fits([gpu_host("a", 0), gpu_host("b", 4)], "trainer", 5)
    assert not never_fits([gpu_host("a", 0), gpu_host("b", 4)], "trainer", 4)
    assert not never_fits([gpu_host("a", 0), gpu_host("old", None)], "trainer", 4), "not told"
    assert not never_fits([], "trainer", 4), "workers may join"
