"""A role's process has ordinary environment variables and its own: no other role's secrets."""

from __future__ import annotations

import asyncio
import os

import pytest
from monarch.actor import Actor, concurrent_endpoint, this_host

from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.services.pool.service import Service

NAMES = ("TEAM_KEY", "AWS_SECRET_ACCESS_KEY", "OMP_NUM_THREADS")


class VariablesActor(Actor):
    """Return the names among NAMES that its process has."""

    @concurrent_endpoint
    async def ready(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def seen(self) -> list[str]:
        return [name for name in NAMES if name in os.environ]


def test_only_the_role_that_needs_a_key_has_it_and_takes_no_spare(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")

    async def scenario() -> dict[str, list[str]]:
        service = await Service.of(
            this_host(), spares=1, variables={"asking": ("TEAM_KEY",)}, spawn_timeout_s=120.0
        )
        try:
            service.warm([1])
            pools = {
                role: service.spawn(VariablesActor, n=1, role=role, spec=RoleSpec(threads=1))
                for role in ("asking", "reading")
            }
            await service.ready()
            return {role: (await pool.fanout("seen"))[0] for role, pool in pools.items()}
        finally:
            await service.stop()

    seen = asyncio.run(scenario())
    assert seen == {"asking": ["TEAM_KEY", "OMP_NUM_THREADS"], "reading": ["OMP_NUM_THREADS"]}
