"""Hosts of a Slurm job: Monarch's own SlurmJob over tools that start real workers here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from fake_slurm import Cluster
from rooms.services.slurm_setup import failure, spec_of

from cartridge_forge.plugins.cluster.hosts.slurm import SlurmHosts
from cartridge_forge.protocols.errors import SpecError


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
