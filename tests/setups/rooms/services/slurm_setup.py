"""Hosts of a Slurm that stands in, and why they fail."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import Cluster, cluster

from cartridge_forge.plugins.cluster.hosts import slurm as slurm_hosts
from cartridge_forge.plugins.cluster.hosts.slurm import SlurmHosts
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RunSpec

ROOT = Path(__file__).resolve().parents[4]


def spec_of(*sets: str) -> RunSpec:
    """Return the LongHealth run on hosts of Slurm, with some keys set."""
    mesh = str(ROOT / "meshes/longhealth.yaml")
    return load_spec(mesh, sets=["hosts.kind=slurm", "plane=torchstore", *sets]).spec


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Yield a Slurm whose queue is asked often."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(slurm_hosts, "QUEUE_SECONDS", 0.1)
    monkeypatch.setattr(slurm_hosts, "WATCH_SECONDS", 0.05)
    with cluster(tmp_path / "slurm", monkeypatch) as made:
        yield made


def failure(source: SlurmHosts) -> str:
    """What `workers` raises before there is one."""

    async def begin() -> None:
        async for workers in source.workers():
            raise AssertionError(f"there are {workers}")

    with pytest.raises(RunError) as raised:
        asyncio.run(asyncio.wait_for(begin(), 60))
    return str(raised.value)
