"""Test a host's worker, and the membership of hosts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_mesh import HEALTH, FakeHost
from namespaces import FORGE

from cartridge_forge.plugins.cluster.hosts import membership as roster_module
from cartridge_forge.plugins.cluster.hosts.addressed import AddressedHosts
from cartridge_forge.plugins.cluster.hosts.handshake import (
    WorkerInfo,
    WorkerInfoServer,
    WorkerUnreachable,
    ask_hello,
)
from cartridge_forge.plugins.cluster.hosts.membership import HostMembership
from cartridge_forge.plugins.host.tls import certificates, read_identity
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.pool import process as process_module
from cartridge_forge.services.pool.hosts import HostWorker, versions
from cartridge_forge.services.pool.process_manager import ProcessManager
from cartridge_forge.services.proc_info import descendants, has_ended

PATIENCE = 60.0


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return min(int(trial.getsockname()[1]), 65000)


@contextlib.contextmanager
def worker(address: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*FORGE, "worker", "--address", address, *words], stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def hello(address: str) -> WorkerInfo:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return asyncio.run(ask_hello(address))
        except WorkerUnreachable:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_it_tells_its_versions_and_where_it_is_attached_to() -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    with worker(address) as process:
        first = hello(address)
        assert first.versions == versions()
        assert not first.draining
        assert first.address.startswith("tcp://127.0.0.1:")
        assert first.address != address
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0, "an idle one ends at once"
    with worker(address):
        again = hello(address)
    assert again.incarnation != first.incarnation
    assert again.address != first.address


ATTACH = """
import asyncio, os, sys, time
import monarch.actor
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.plugins.cluster.hosts.handshake import ask_hello
from cartridge_forge.plugins.cluster.hosts.membership import attach
monarch.actor.enable_transport("tls://localhost:0")
async def main():
    deadline = time.monotonic() + 30
    while True:
        try:
            hello = await ask_hello(sys.argv[1])
            break
        except RunError as error:
            if "verify failed" in str(error) or time.monotonic() > deadline:
                return type(error).__name__
            await asyncio.sleep(0.1)
    await attach(hello.address, timeout_s=20.0)
    return "attached"
print(asyncio.run(main()), flush=True)
os._exit(0)
"""


def test_members_attach_to_a_worker_with_a_certificate_that_listens_on_all(
    tmp_path: Path,
) -> None:
    """Called by a name, it listens on 0.0.0.0: Monarch is given a socket that listens already."""
    [own] = certificates(tmp_path / "mesh", [("localhost",)])
    [foreign] = certificates(tmp_path / "foreign", [("localhost",)])
    port = free_port()
    address = f"tls://localhost:{port}"

    def attached(folder: Path) -> str:
        environment = {**os.environ, **read_identity(folder, "own").environment()}
        words = [sys.executable, "-c", ATTACH, address]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    with worker(f"{address}@tls://0.0.0.0:{port}", "--tls", str(own)):
        assert attached(own) == "attached"
        assert attached(foreign) == "WorkerUnreachable"
        for name in ("ca.crt", "tls.crt", "tls.key"):
            (own / name).write_bytes((foreign / name).read_bytes())
        assert attached(foreign) == "attached", "renewed files count from the next connection on"


CHILD = """
import subprocess, sys
from cartridge_forge.plugins.cluster.hosts import worker
subprocess.Popen(["sleep", "600"])
worker.main(sys.argv[1], float(sys.argv[2]))
"""


@pytest.mark.parametrize(("grace", "signals"), [(1.0, 1), (600.0, 2)])
def test_children_are_waited_for_until_the_grace_or_a_second_signal(
    grace: float, signals: int
) -> None:
    address = f"tcp://127.0.0.1:{free_port()}"
    process = subprocess.Popen([sys.executable, "-c", CHILD, address, str(grace)])
    children: list[int] = []
    try:
        hello(address)
        children = descendants(process.pid)
        assert children
        deadline = time.monotonic() + PATIENCE
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)  # Monarch's servers may still be starting
        while not hello(address).draining:
            assert time.monotonic() < deadline
        assert process.poll() is None
        if signals == 2:
            process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert time.monotonic() - begun > (grace if signals == 1 else 0.0) - 0.1
        assert all(map(has_ended, children))
    finally:
        for pid in (*children, process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def test_a_taken_address_is_an_error_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with worker(f"tcp://127.0.0.1:{port}") as process:
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 1
    assert f"error: a worker cannot listen on 127.0.0.1:{port}" in said
    assert "Choose another with --address" in said


NEEDED = {"torchmonarch": "0.7.0"}


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
