"""The shared-memory plane's directory goes with its owner, by whatever death."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from services.shared_memory import SharedMemoryPlane

OWNER = """
import asyncio, sys, time, torch
from services.shared_memory import SharedMemoryPlane

async def own():
    plane = await SharedMemoryPlane.start(sys.argv[1])
    await plane.put("x", {"x": torch.zeros(3)})
    print(plane.root, plane._janitor.pid, flush=True)
    time.sleep(60)

asyncio.run(own())
"""


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def wait_for(condition: object, seconds: float = 60.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    return bool(condition())  # type: ignore[operator]


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_owner_held_is_removed(tmp_path: Path, death: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert owner.stdout is not None
    with owner.stdout as out:
        root, janitor = out.readline().split()
    assert list(Path(root).iterdir())
    # As a terminal does, to the whole group: the janitor is not in it, and shrugs it off besides.
    os.kill(int(janitor), signal.SIGINT)
    os.kill(int(janitor), signal.SIGTERM)
    os.killpg(owner.pid, death)
    owner.wait(timeout=60)
    assert wait_for(lambda: os.listdir(tmp_path) == [])
    assert wait_for(lambda: has_ended(int(janitor)))


def test_a_stopped_plane_leaves_no_janitor(tmp_path: Path) -> None:
    async def run() -> int:
        plane = await SharedMemoryPlane.start(str(tmp_path))
        assert plane._janitor is not None
        janitor = plane._janitor.pid
        await plane.put("x", {"x": torch.zeros(3)})
        await plane.stop()
        return janitor

    assert has_ended(asyncio.run(run()))
    assert os.listdir(tmp_path) == []
