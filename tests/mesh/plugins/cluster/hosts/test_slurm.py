"""Test hosts of a Slurm job, and its commands."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from fake_slurm import JOB, Cluster, cluster, options
from rooms.services.slurm_setup import ROOT, failure, spec_of

from cartridge_forge.plugins.cluster.hosts import slurm as slurm_hosts
from cartridge_forge.plugins.cluster.hosts.membership import HostMembership
from cartridge_forge.plugins.cluster.hosts.slurm import NOBODY, QueuedJob, SlurmHosts
from cartridge_forge.protocols.errors import HostsEndedError, RunError, SpecError
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT, HostWorker

SCENARIO = ROOT / "tests/scenarios/slurm_scenario.py"


def test_what_is_asked_for_and_a_job_that_waits_too_long(slurm: Cluster, tmp_path: Path) -> None:
    slurm.set(state="PENDING", reason="Resources")
    source = SlurmHosts(
        spec_of(
            "hosts.slurm.nodes=3", "hosts.slurm.partition=gpu", "hosts.slurm.account=forge",
            'hosts.slurm.time_limit="01:30:00"', "hosts.slurm.gpus_per_node=8",
            'hosts.slurm.args=["--qos=high"]', "hosts.slurm.start_timeout_s=0.5",
        )
    )  # fmt: skip
    assert failure(source) == (
        f"the Slurm job {JOB} did not start within 0.5 s: PENDING (Resources); raise "
        "hosts.slurm.start_timeout_s, or ask for fewer nodes or another partition"
    )
    assert slurm.facts["state"] == "CANCELLED"
    asked = options(slurm.script)
    name = asked.pop("job-name")
    assert name.startswith("forge-longhealth-")
    assert name.endswith(f"_{os.getpid()}")
    logs = tmp_path / "runs/longhealth/slurm"
    link = ",".join(f"{key}={value}" for key, value in LINK_ENVIRONMENT.items())
    assert asked == {
        "nodes": "3", "ntasks-per-node": "1", "partition": "gpu", "account": "forge",
        "time": "01:30:00", "gpus-per-node": "8", "qos": "high", "exclusive": "",
        "export": f"ALL,{link},SLURM_NO_KILL=set", "no-requeue": "", "no-kill": "",
        "output": f"{logs}/slurm_%j_{name}.out", "error": f"{logs}/slurm_%j_{name}.err",
    }  # fmt: skip
    assert f"srun {sys.executable} -c " in slurm.script
    assert not (tmp_path / ".monarch").exists()


@pytest.mark.parametrize(
    ("state", "reason", "said"),
    [
        ("FAILED", "BadConstraints", "ended before it began: FAILED (BadConstraints)"),
        ("CANCELLED", "None", "ended before it began: CANCELLED"),
        ("gone", "None", "ended before it began: not in the queue"),
    ],
)
def test_a_job_that_ends_in_the_queue(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch, state: str, reason: str, said: str
) -> None:
    monkeypatch.setattr(slurm_hosts, "LIST_SECONDS", 0.2)
    slurm.set(state=state, reason=reason, silent=0 if state == "gone" else 1)
    source = SlurmHosts(spec_of())
    told = failure(source)
    assert said in told
    # The service asks a source again and again. It does not submit a job each time.
    monkeypatch.setattr(source, "_make", None)
    assert failure(source) == told


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (
            [None, QueuedJob(JOB, "COMPLETING", "None"), QueuedJob(JOB, "TIMEOUT", "TimeLimit")],
            f"the Slurm job {JOB} ended: TIMEOUT (TimeLimit); its nodes are gone",
        ),
        (
            [QueuedJob(JOB, "PENDING", "BeginTime")],
            f"the Slurm job {JOB} was put back into the queue: PENDING (BeginTime); its nodes",
        ),
        ([NOBODY], "the Slurm job ended: not in the queue; its nodes are gone"),
    ],
)
def test_why_a_job_no_longer_runs(
    monkeypatch: pytest.MonkeyPatch, seen: list[QueuedJob | None], said: str
) -> None:
    source = SlurmHosts(spec_of())
    answers = iter(seen)

    async def look() -> QueuedJob | None:
        return next(answers)

    monkeypatch.setattr(slurm_hosts, "WATCH_SECONDS", 0.01)
    monkeypatch.setattr(source, "_look", look)
    with pytest.raises(RunError, match=re.escape(said)):
        asyncio.run(source._ended())


def test_hosts_that_have_ended_are_not_asked_for_again() -> None:
    async def follow() -> None:
        async def workers() -> AsyncGenerator[tuple[HostWorker, ...]]:
            raise HostsEndedError("the job ended")
            yield ()

        none: Any = None
        membership = HostMembership(none, none, {}, 1.0, none, none)
        await asyncio.wait_for(membership._keep_up(workers()), 60)

    with pytest.raises(HostsEndedError, match="the job ended"):
        asyncio.run(follow())


def test_a_job_whose_workers_do_not_start(slurm: Cluster, tmp_path: Path) -> None:
    slurm.set(broken=True, delay_s=0.5)
    said = failure(SlurmHosts(spec_of()))
    assert "FAILED" in said  # whether squeue told it, or SlurmJob before it cancelled the job
    assert f"what the nodes wrote is in {tmp_path}/runs/longhealth/slurm" in said


def test_a_job_that_cannot_be_cancelled(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_hosts, "CANCEL_SECONDS", 0.5)
    slurm.set(state="PENDING", reason="Priority", stuck=True)
    said = failure(SlurmHosts(spec_of("hosts.slurm.start_timeout_s=0.2")))
    assert "PENDING (Priority)" in said
    assert said.endswith(f"the Slurm job was not cancelled; end it with: scancel {JOB}")


@pytest.fixture(scope="module", params=["cancelled", "preempted"])
def report(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as patch, cluster(directory / "slurm", patch) as slurm:
        spec = json.dumps(spec_of("hosts.slurm.nodes=2").as_dict())
        done = subprocess.run(
            [sys.executable, str(SCENARIO), str(slurm.directory), spec, request.param],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200, cwd=directory,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "made": sorted(p.name for p in directory.iterdir())}


def test_a_worker_on_every_node_is_attached(report: dict[str, Any]) -> None:
    assert report["workers"] == [["host0", "", "", 0], ["host1", "", "", 0]]
    assert report["hosts"] == ["host0", "host0", "host1", "host1"]
    assert report["who"] == [JOB, LINK_ENVIRONMENT["HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT"]]
    before, after = report["transports"]
    assert before == after, "SlurmJob sets another"


def test_nothing_is_left_of_the_job(report: dict[str, Any]) -> None:
    assert report["state"] in ("CANCELLED", "PREEMPTED")
    assert report["alive"] == []
    assert report["made"] == ["runs", "slurm"], "its output, and the fake's own files"


@pytest.mark.parametrize("report", ["preempted"], indirect=True)
def test_the_end_of_the_job_is_told(report: dict[str, Any]) -> None:
    told = f"the Slurm job {JOB} ended: PREEMPTED; its nodes are gone, and the checkpoints are kept"
    assert f"{told}: go on with --resume" in report["end"]


def test_a_worker_that_listens_later_is_waited_for() -> None:
    async def follow() -> list[bool]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        waiting = asyncio.ensure_future(slurm_hosts.until_listening("127.0.0.1", port))
        before, _ = await asyncio.wait({waiting}, timeout=3 * slurm_hosts.LISTEN_SECONDS)
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port):
            await asyncio.wait_for(waiting, 60)
        return [not before, waiting.done()]

    assert asyncio.run(follow()) == [True, True]


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
