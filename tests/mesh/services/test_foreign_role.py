"""A role of another package, found by its entry point, in a process of a pool."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cartridge_forge.protocols.plugins import GROUP

CODE = """
from monarch.actor import Actor, endpoint
from cartridge_forge.protocols.plugins import Plugin


class Doubler(Actor):
    def __init__(self, times: int) -> None:
        self.times = times

    @endpoint
    async def ready(self) -> int:
        return self.times

    @endpoint
    async def double(self, word: str) -> str:
        return word * self.times


PLUGIN = Plugin("doubler", roles={"doubler": "doubler_plugin:Doubler"})
"""
USER = """
import asyncio

from monarch.actor import this_host

from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.service import Service
from cartridge_forge.services.roles import actor_class


async def main() -> None:
    service = await Service.of(this_host())
    actor = actor_class("doubler")
    pool = service.spawn(actor, n=1, args=(2,), role="doubler", spec=RoleSpec())
    await service.ready()
    print("answer", await pool.route("double", "ab"))
    await service.stop()


asyncio.run(main())
"""


def test_a_role_of_another_package_answers(tmp_path: Path) -> None:
    (tmp_path / "doubler_plugin.py").write_text(CODE)
    info = tmp_path / "doubler_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: doubler-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\ndoubler = doubler_plugin:PLUGIN\n")
    user = tmp_path / "user.py"
    user.write_text(USER)
    path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, str(user)],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "answer abab" in done.stdout
