"""Test roles of a mesh: a publish that breaks, a role of others."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from loop_setup import run_with, small_spec
from monarch.actor import endpoint

from cartridge_forge.actors.generator import GeneratorActor
from cartridge_forge.learning.cartridge import since_of
from cartridge_forge.protocols.errors import PublishError, StaleTokenError
from cartridge_forge.protocols.plugins import CORE, GROUP
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    GenerateOutput,
    GenerateRequest,
    PrefixRef,
)
from cartridge_forge.services.run_directory import RunDirectory


class Deaf(GeneratorActor):
    """Acknowledges every publish after the first without taking it: the seed system's defect."""

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        if snapshot.version == 0:
            new = await self._cartridges.fetch(self._plane.get, snapshot.cartridges, self._model)
            self._cartridges.add(0, since_of(snapshot.cartridges), new)
        return snapshot.version


class Lying(Deaf):
    """Deaf, and answers requests for newer versions with the old one, saying which it used."""

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        from cartridge_forge.learning.decode import generate

        old = [
            r
            if r.prefix.name.startswith("document/")
            else GenerateRequest(
                r.id, r.prompt_ids, PrefixRef(r.prefix.name, 0), r.sampling, r.seed
            )
            for r in requests
        ]
        done = generate(self._model, old, self._lookup, self._end_ids, served=self._served)
        return GenerateOutput(0.0, tuple(done))


@pytest.mark.parametrize(
    ("broken", "error", "message"),
    [
        (Deaf, PublishError, r"version 1 is not held here \(held: \[0\]\)"),
        (Lying, StaleTokenError, r"version 1, .* which is cartridge patient_\d+ version 0"),
    ],
)
def test_a_broken_publish_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    broken: type[Any],
    error: type[Exception],
    message: str,
) -> None:
    monkeypatch.setitem(CORE.roles, "generator", f"{broken.__module__}:{broken.__name__}")
    spec = small_spec()
    directory = RunDirectory.create(tmp_path, spec.mesh.name, "spec")
    with pytest.raises(error, match=message):
        asyncio.run(run_with(spec, directory))
    # Step 1 trained on version 0's own tokens; nothing was trained after the publish that broke.
    lines = directory.metrics.read_text().splitlines()
    assert len(lines) == 1


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
