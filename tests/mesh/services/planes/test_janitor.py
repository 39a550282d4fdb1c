"""The shared-memory plane's directory goes with its owner, by whatever death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

OWNER = """
import asyncio, os, signal, sys, time, torch
from cartridge_forge.services.planes.shared_memory import SharedMemoryPlane

async def own(home):
    plane = await SharedMemoryPlane.start(home)
    await plane.put("x", {"x": torch.zeros(3)})
    print(os.getpid(), plane.root, plane._owned.janitor.pid, flush=True)
    time.sleep(600)

for home in sys.stdin:
    if os.fork() == 0:
        os.setsid()
        asyncio.run(own(home.strip()))
os.wait()
"""


@pytest.fixture(scope="module")
def owners() -> Iterator[subprocess.Popen[str]]:
    """Begins an owner, in a session of its own, for every directory that it is told."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    yield process
    process.communicate(timeout=60)


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(condition: object, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_owner_held_is_removed(
    tmp_path: Path, death: signal.Signals, owners: subprocess.Popen[str]
) -> None:
    assert owners.stdin is not None
    assert owners.stdout is not None
    owners.stdin.write(f"{tmp_path}\n")
    owners.stdin.flush()
    owner, root, janitor = owners.stdout.readline().split()
    assert list(Path(root).iterdir())
    # As a terminal does, to the whole group: the janitor is not in it, and shrugs it off besides.
    os.kill(int(janitor), signal.SIGINT)
    os.kill(int(janitor), signal.SIGTERM)
    os.killpg(int(owner), death)
    assert wait_for(lambda: os.listdir(tmp_path) == [])
    assert wait_for(lambda: has_ended(int(janitor)))
