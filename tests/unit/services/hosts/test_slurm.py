"""Hosts of a Slurm job: Monarch's own SlurmJob over tools that start real workers here."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_slurm import Cluster, cluster

from protocols.errors import RunError, SpecError
from protocols.spec.loading import load_spec
from protocols.spec.mesh import RunSpec
from services.hosts import slurm as slurm_hosts
from services.hosts.slurm import SlurmHosts

ROOT = Path(__file__).resolve().parents[4]


def spec_of(*sets: str) -> RunSpec:
    mesh = str(ROOT / "meshes/longhealth.yaml")
    return load_spec(mesh, sets=["hosts.kind=slurm", "plane=torchstore", *sets]).spec


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
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


def test_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert failure(SlurmHosts(spec_of())) == (
        "hosts.kind slurm needs Slurm's tools, and sbatch, squeue, scancel is not on PATH; start "
        "forge-run on a login node of the cluster, or choose another hosts.kind"
    )


def test_an_environment_that_would_not_reach_the_workers(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"hosts.slurm.args: --export=NONE is not"):
        SlurmHosts(spec_of('hosts.slurm.args=["--export=NONE"]'))
    monkeypatch.setenv("SBATCH_EXPORT", "NONE")
    assert "unset it" in failure(SlurmHosts(spec_of("hosts.slurm.nodes=2")))
    assert "name" not in slurm.facts, "nothing was submitted"


def test_a_job_that_slurm_does_not_take(slurm: Cluster) -> None:
    slurm.set(refuses="invalid partition specified: gpus")
    said = failure(SlurmHosts(spec_of()))
    assert "invalid partition specified: gpus" in said
    assert "check hosts.slurm against sinfo" in said


def test_what_sbatch_made_is_cancelled_though_it_did_not_say_so(slurm: Cluster) -> None:
    slurm.set(state="PENDING", mute=True)
    assert "Slurm did not take the job" in failure(SlurmHosts(spec_of()))
    assert slurm.facts["state"] == "CANCELLED"


def test_the_json_of_an_older_slurm(slurm: Cluster) -> None:
    slurm.set(nodes_as="text", delay_s=30)
    said = failure(SlurmHosts(spec_of()))
    assert "SlurmJob reads the JSON of Slurm 24.05 and newer" in said
    assert slurm.facts["state"] == "CANCELLED"


def test_who_stops_waiting_leaves_no_job(slurm: Cluster) -> None:
    slurm.set(state="PENDING", reason="Priority")

    async def stop() -> None:
        source = SlurmHosts(spec_of())
        first = asyncio.ensure_future(anext(source.workers()))
        async with asyncio.timeout(20):
            while "name" not in slurm.facts:  # noqa: ASYNC110 - another process writes it
                await asyncio.sleep(0.02)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await source.close()

    asyncio.run(asyncio.wait_for(stop(), 60))
    assert slurm.facts["state"] == "CANCELLED"
