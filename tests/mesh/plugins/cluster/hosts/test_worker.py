"""`forge worker`: what it says, and how it ends."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import FORGE

from cartridge_forge.plugins.cluster.hosts.handshake import WorkerInfo, WorkerUnreachable, ask_hello
from cartridge_forge.plugins.cluster.tls.certificates import certificates
from cartridge_forge.plugins.cluster.tls.identity import read_identity
from cartridge_forge.services.pool.hosts import versions
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
from cartridge_forge.services.pool.hosts import attach
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
