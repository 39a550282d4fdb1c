"""Provide workers on the nodes of one Slurm job, submitted for the run by Monarch's SlurmJob.

    sbatch -> wait in the queue -> a worker on every node is attached -> the run -> scancel

On the host of `forge-run`, sbatch, squeue and scancel must be on PATH (Slurm 24.05 or newer, whose
JSON SlurmJob reads). The nodes must reach this host by its name and see the same directories: they
run the same Python, so all versions are equal. Nodes are taken whole, because a worker listens on
the same port of each. The job's output is in `<runs of the mesh>/slurm/`.

Slurm ends the job at its time limit, for a job with priority, or when its first node fails, where
its script runs. The run then ends with a checkpoint, and `--resume` continues it with a new job.
When another node fails, the job goes on with those that are left (--no-kill). If this process is
killed (kill -9), nothing cancels the job before its time limit.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from cartridge_forge.plugins.cluster.hosts.worker import PORT, SETTLE_SECONDS
from cartridge_forge.plugins.cluster.spec import ClusterHosts, SlurmSpec
from cartridge_forge.protocols.errors import HostsEndedError, RunError, SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.hosts import LINK_ENVIRONMENT, HostWorker, finish

if TYPE_CHECKING:
    from monarch.actor import HostMesh
    from monarch.job import SlurmJob

TOOLS = ("sbatch", "squeue", "scancel")
ASK_SECONDS = 30.0  # for one call of Slurm's tools: a busy controller takes several
SUBMIT_SECONDS = 60.0
LIST_SECONDS = 30.0  # until a job that was submitted is listed
REASON_SECONDS = 10.0  # for why a job ended, on a busy login node
QUEUE_SECONDS = 2.0  # between two looks at a job that waits
WATCH_SECONDS = 10.0  # between two looks at a running job
ATTACH_SECONDS = 120.0  # a node's Python may come over a busy network file system
LISTEN_SECONDS = 0.2  # between two tries to connect to a node's worker
CANCEL_SECONDS = 15.0
WAITS = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED"}
RUNS = {"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}

T = TypeVar("T")


@dataclass(frozen=True)
class QueuedJob:
    """Hold a job as squeue reports it: `QueuedJob("4711", "PENDING", "Resources")`."""

    job: str
    state: str
    reason: str

    def __str__(self) -> str:
        return f"{self.state} ({self.reason})" if self.reason not in ("", "None") else self.state


NOBODY = QueuedJob("", "not in the queue", "")


class SlurmHosts:
    """Implement HostSource: `slurm.nodes` workers for every role. Failures are RunErrors."""

    def __init__(self, spec: RunSpec) -> None:
        slurm = ClusterHosts.of(spec.mesh.hosts).slurm or SlurmSpec()
        for arg in slurm.args:
            if arg.partition("=")[0] in ("--export", "--parsable"):
                raise SpecError(
                    f"hosts.slurm.args: {arg} is not the user's to give: workers get this "
                    "process's environment; remove it, and export variables before forge-run"
                )
        self._spec = slurm
        self._logs = spec.default_run_root.absolute() / "slurm"
        # The name is unique, so squeue finds the job even when sbatch's output is lost.
        self._name = f"forge-{spec.mesh.name}-{secrets.token_hex(4)}"
        self._job: SlurmJob | None = None
        self._submitting: asyncio.Future[None] | None = None
        self._over: HostsEndedError | None = None  # why there is no job any more

    async def workers(self) -> AsyncGenerator[tuple[HostWorker, ...]]:
        if self._over is not None:  # asked again: a run has one job, and who ended it meant that
            raise self._over
        try:
            job = self._job = self._make()
            self._submitting = in_thread(job.apply)
            await self._submitted(self._submitting)
            await self._started()
            meshes = await self._attached(job)
            yield tuple(HostWorker(f"host{i}", "", mesh=mesh) for i, mesh in enumerate(meshes))
            await self._ended()
        except RunError as error:
            self._over = HostsEndedError(str(error))
            try:
                await self.close()
            except RunError as cause:
                self._over = HostsEndedError(f"{error}; {cause}")
            raise self._over from error
        except asyncio.CancelledError:
            await self.close()
            raise

    async def want(self, role: str, replicas: int) -> None:
        """Do nothing: the job's nodes are for all roles, and the job cannot grow."""

    def lacking(self) -> tuple[str, ...]:
        return ()

    async def close(self) -> None:
        """Cancel the job in any state. Raises RunError when it still runs."""
        job, self._job = self._job, None
        if job is None:
            return
        if self._submitting is not None:  # sbatch cannot be stopped, only its job
            await asyncio.wait({self._submitting}, timeout=CANCEL_SECONDS)
        await asyncio.wait({in_thread(job.kill)}, timeout=CANCEL_SECONDS)
        deadline = time.monotonic() + CANCEL_SECONDS
        while (queued := await self._look()) is None or queued.state in WAITS | RUNS:
            if time.monotonic() > deadline:
                named = queued.job if queued else f"--name={self._name}_{os.getpid()}"
                raise RunError(f"the Slurm job was not cancelled; end it with: scancel {named}")
            if queued is not None:  # submitted by sbatch, but unknown to SlurmJob
                await ask("scancel", queued.job)
            await asyncio.sleep(QUEUE_SECONDS / 4)

    # -- the job --------------------------------------------------------------------------------

    def _make(self) -> SlurmJob:
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise RunError(
                f"hosts.kind slurm needs Slurm's tools, and {', '.join(missing)} is not on PATH; "
                "start forge-run on a login node of the cluster, or choose another hosts.kind"
            )
        if "SBATCH_EXPORT" in os.environ:  # it takes precedence over the job's script
            raise RunError("SBATCH_EXPORT keeps the workers' settings from them; unset it")
        from monarch.config import configure, get_global_config
        from monarch.job import SlurmJob

        # SlurmJob's log handlers write to the terminal, into the run's display.
        for room in ("slurm", "job"):
            logging.getLogger(f"monarch._src.job.{room}").setLevel(logging.ERROR)
        slurm = self._spec
        exported = {
            **LINK_ENVIRONMENT,
            "SLURM_NO_KILL": "set",
        }  # of srun, as --no-kill is of sbatch
        link = ",".join(f"{key}={value}" for key, value in exported.items())
        chosen = get_global_config()["default_transport"]
        job = SlurmJob(
            # One mesh per node: a mesh with a dead host neither spawns nor shuts down.
            meshes={f"host{i}": 1 for i in range(slurm.nodes)},
            python_exe=sys.executable,
            # After a requeue, its workers would wait for a run that has ended. Without
            # --no-kill a node that fails, of any role, would end the job.
            slurm_args=(f"--export=ALL,{link}", "--no-requeue", "--no-kill", *slurm.args),
            monarch_port=PORT,
            job_name=self._name,
            time_limit=slurm.time_limit,
            partition=slurm.partition,
            account=slurm.account,
            gpus_per_node=slurm.gpus_per_node,
            exclusive=True,
            log_dir=str(self._logs),
            job_start_timeout=round(ASK_SECONDS),  # once squeue has reported that it runs
        )
        configure(default_transport=chosen)  # SlurmJob has replaced this process's transport
        return job

    async def _submitted(self, submitting: asyncio.Future[None]) -> None:
        try:
            # Python 3.11's wait_for loses a cancellation that comes with the result.
            async with asyncio.timeout(SUBMIT_SECONDS):
                await asyncio.shield(submitting)
        except TimeoutError as error:
            raise RunError(
                f"sbatch did not answer within {SUBMIT_SECONDS:g} s; is Slurm's controller up "
                "(scontrol ping)?"
            ) from error
        except Exception as error:  # SlurmJob's error from sbatch's output
            raise RunError(
                f"Slurm did not take the job: {error}; check hosts.slurm against sinfo"
            ) from error

    async def _started(self) -> None:
        """Return once the job runs."""
        last = NOBODY
        start = time.monotonic()
        while True:
            job = await self._look()
            last = job or last
            waited = time.monotonic() - start
            if last.state in RUNS:
                return
            unlisted = last is NOBODY and (job is None or waited < LIST_SECONDS)
            if last.state not in WAITS and not unlisted:
                raise RunError(
                    f"the Slurm job {last.job} ended before it began: {last}; what the nodes "
                    f"wrote is in {self._logs}"
                )
            if waited > self._spec.start_timeout_s:
                raise RunError(
                    f"the Slurm job {last.job} did not start within "
                    f"{self._spec.start_timeout_s:g} s: {last}; raise hosts.slurm.start_timeout_s, "
                    "or ask for fewer nodes or another partition"
                )
            await asyncio.sleep(QUEUE_SECONDS)

    async def _attached(self, job: SlurmJob) -> list[HostMesh]:
        """Return a mesh for each node once its worker answers. Raises RunError if the job ends."""
        attaching = asyncio.ensure_future(self._attach(job))
        ending = asyncio.ensure_future(self._ended())
        try:
            finished, _ = await asyncio.wait(
                {attaching, ending}, timeout=ATTACH_SECONDS, return_when=asyncio.FIRST_COMPLETED
            )
            if ending in finished:  # SlurmJob may have cancelled it, and then raises the reason
                await asyncio.wait({attaching}, timeout=REASON_SECONDS)
            if attaching.done():
                return attaching.result()
            if ending in finished:
                ending.result()
            raise RunError(
                f"no worker on every node answered within {ATTACH_SECONDS:g} s; check that the "
                f"nodes reach this host, and what they wrote in {self._logs}"
            )
        finally:
            for task in (attaching, ending):
                task.cancel()
            await asyncio.wait({attaching, ending})

    async def _attach(self, job: SlurmJob) -> list[HostMesh]:
        try:
            await self._listening()
            # Without a path, SlurmJob writes no copy of itself to .monarch/.
            state = await in_thread(partial(job.state, cached_path=None))
            meshes = [getattr(state, f"host{i}") for i in range(self._spec.nodes)]
            await asyncio.gather(*(finish(mesh.initialized) for mesh in meshes))
            return meshes
        except Exception as error:  # any error of Slurm's JSON or Monarch's sockets
            queued = await self._look()
            # SlurmJob itself cancels the job, and its error has the reason.
            if queued is not None and queued.state not in RUNS | {"CANCELLED"}:
                raise self._end(queued) from error
            raise RunError(
                f"the nodes of the Slurm job were not attached ({error!r:.200}); SlurmJob reads "
                f"the JSON of Slurm 24.05 and newer; what the nodes wrote is in {self._logs}"
            ) from error

    async def _listening(self) -> None:
        """Return once every node's worker can be attached to.

        A message that reaches Monarch's server before its agent is there ends the actor that sent
        it, and Monarch has no call that tells when the agent is there: SETTLE_SECONDS are for that.
        """
        output = await ask("squeue", "--me", "--json")
        jobs = json.loads(output)["jobs"] if output else []
        for job in jobs:
            if job["name"].startswith(self._name):
                for node in job["job_resources"]["nodes"]["allocation"]:
                    await until_listening(node["name"], PORT)
        await asyncio.sleep(SETTLE_SECONDS)

    async def _ended(self) -> None:
        """Raise RunError once squeue reports that the job no longer runs, and why."""
        completing: float | None = None
        while True:
            job = await self._look()
            if job is None or job.state in RUNS:
                await asyncio.sleep(WATCH_SECONDS)
                continue
            # While its processes end, squeue does not say why.
            completing = completing or time.monotonic()
            if job.state != "COMPLETING" or time.monotonic() - completing > REASON_SECONDS:
                raise self._end(job)
            await asyncio.sleep(QUEUE_SECONDS / 4)

    def _end(self, job: QueuedJob) -> RunError:
        named = f"the Slurm job {job.job}".rstrip()
        what = "was put back into the queue" if job.state in WAITS else "ended"
        return RunError(
            f"{named} {what}: {job}; its nodes are gone, and the checkpoints "
            "are kept: go on with --resume, which submits a new one "
            f"(hosts.slurm.time_limit is {self._spec.time_limit or 'the default'}; what the nodes "
            f"wrote is in {self._logs})"
        )

    async def _look(self) -> QueuedJob | None:
        """Return the job's state; None when squeue fails, as it does when it is busy."""
        output = await ask("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%j")
        if output is None:
            return None
        for line in output.splitlines():
            job, state, reason, name = line.strip().split("|", 3)
            if name.startswith(self._name):
                return QueuedJob(job, state, reason)
        return NOBODY


async def ask(*command: str) -> str | None:
    """Return the output of one of Slurm's tools; None where it fails or takes over ASK_SECONDS."""
    asking = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(ASK_SECONDS):
            output, _ = await asking.communicate()
    except TimeoutError:
        return None
    finally:
        if asking.returncode is None:
            asking.kill()
            await asking.wait()
    return output.decode(errors="replace") if asking.returncode == 0 else None


async def until_listening(host: str, port: int) -> None:
    """Return once something listens there, without a bound of its own."""
    while True:
        try:
            async with asyncio.timeout(ASK_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return
        except OSError:  # not yet, or an unknown name; a TimeoutError is one
            await asyncio.sleep(LISTEN_SECONDS)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run a blocking call in a daemon thread and return a future of its result. Unlike a thread of
    asyncio's pool, which the loop joins at its end, a call that hangs dies with the process."""
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]  # there without an error
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except Exception as failed:
            error = failed
        except BaseException as panic:  # Monarch's Rust panic, which is no Exception
            error = RuntimeError(str(panic))
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="slurm", daemon=True).start()
    return future
