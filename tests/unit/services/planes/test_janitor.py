"""The shared-memory plane's directory goes with its owner, by whatever death."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import torch

from cartridge_forge.services.planes.shared_memory import SharedMemoryPlane


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_a_stopped_plane_leaves_no_janitor(tmp_path: Path) -> None:
    async def run() -> int:
        plane = await SharedMemoryPlane.start(str(tmp_path))
        assert plane._owned is not None
        janitor = plane._owned.janitor.pid
        await plane.put("x", {"x": torch.zeros(3)})
        await plane.stop()
        return janitor

    assert has_ended(asyncio.run(run()))
    assert os.listdir(tmp_path) == []
