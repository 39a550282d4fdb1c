"""Supervise the roles and drive one run from its start, or a checkpoint, to results.

    spawn roles -> evaluate untrained -> train on policy (training.loop) -> evaluate
                -> evaluate none, document
                -> train offline on as many tokens -> evaluate -> results

ControllerActor owns the process mesh of every role, so every death reaches its `__supervise__`. The
service (services.pool.service) replaces dead replicas. The run fails only when a role has used up
its restarts: with the role's name, a checkpoint and a summary. This module imports no torch, so the
client that spawns it needs none.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, MeshFailure, concurrent_endpoint

from protocols.errors import ForgeError, RunError
from protocols.layout import length_warning
from protocols.records.run_files import EventName, RunOutcome
from protocols.records.status import RunStatus
from protocols.spec.mesh import RunSpec
from services.control.endpoints import Endpoints, remove_endpoints, write_endpoints
from services.proc_info import CpuSeconds, cpu_seconds
from services.run_directory import RunDirectory

if TYPE_CHECKING:
    from services.control.commands import RunCommands
    from services.mesh import Mesh
    from services.telemetry.recorder import RunLog
    from training.training_run import TrainingRun

ENGINE_STOP_SECONDS = 10.0  # an idle engine stops in 1 to 2 s


class ControllerActor(Actor):
    """Run one spec: `run` returns when it ends; `status` and `ask_to_stop` answer meanwhile.
    `client` is the id of the process that started this one's."""

    def __init__(self, spec: RunSpec, run_path: str, resume: bool, client: int) -> None:
        self._spec = spec
        self._client = client
        self._cpu_before: CpuSeconds | None = None
        self._directory = RunDirectory(Path(run_path))
        self._resume = resume
        self._status = RunStatus()
        self._mesh: Mesh | None = None
        self._run: TrainingRun | None = None
        self._helm: RunCommands | None = None
        self._stop_asked = False
        self._opening: asyncio.Task[Mesh] | None = None
        self._recorder: RunLog | None = None

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Return whether the service handles the death of an owned process or actor."""
        return self._mesh is None or self._mesh.service.noticed(failure)

    @concurrent_endpoint
    async def status(self) -> RunStatus:
        return self._whole_status()

    @concurrent_endpoint
    async def ask_to_stop(self) -> None:
        """End the run after the step in progress, with a checkpoint and the results so far."""
        self._stop_asked = True
        if self._helm is not None:
            await self._helm.stop()
        elif self._opening is not None:  # hosts may wait in a queue for hours
            self._opening.cancel()

    @concurrent_endpoint
    async def run(self) -> str:
        """Drive the run; return "finished" or "stopped". Raises a ForgeError when the run fails."""
        from services.control.commands import RunCommands, StopRequested
        from services.control.server import ControlPlane
        from services.telemetry.hub import open_sinks
        from services.telemetry.recorder import RunLog
        from services.telemetry.watchdog import watch

        begun = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        if self._resume:
            self._directory.mend_events()
        sinks = open_sinks(self._spec, self._directory, self._report_sink)
        recorder = self._recorder = RunLog(self._directory, sinks)
        recorder.event("run_started", resumed=self._resume, mesh=self._spec.mesh.name)
        mesh = self._mesh = await self._open(recorder, begun)
        if mesh is None:
            return "stopped"
        helm = self._helm = RunCommands(
            self._whole_status, self._show, lambda: mesh.pools, recorder, mesh.service.scale,
            self._spec.mesh.control.max_replicas,
        )  # fmt: skip
        if self._stop_asked:
            await helm.stop()
        control = ControlPlane(helm, self._spec.mesh.control, self._directory.id)
        watching = asyncio.create_task(
            watch(
                self._whole_status, self._show, recorder, mesh.pools,
                self._spec.mesh.watchdog, self._directory.path,
            )
        )  # fmt: skip
        outcome: RunOutcome = "failed"
        try:
            await control.start()
            endpoints = Endpoints(control.address, sinks.metrics_url, os.getpid())
            write_endpoints(self._directory.path, endpoints)
            await self._or_failure(self._drive(recorder, mesh, helm, begun), mesh)
            outcome = "finished"
        except StopRequested:
            outcome = "stopped"
        except Exception as error:
            message = str(error) if isinstance(error, ForgeError) else f"{error!r}"
            recorder.event("failed", error=type(error).__name__, message=message)
            self._show(error=message)
            if isinstance(error, ForgeError):
                raise
            raise RunError(f"the run failed on {message}") from error
        finally:
            helm.over()
            if self._run is not None:
                if outcome != "finished":
                    await self._last_checkpoint(recorder)
                self._run.write_results(outcome, time.perf_counter() - begun, self._cpu())
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._stop_engines(recorder, mesh)
            await mesh.stop()
            seconds = round(time.perf_counter() - begun, 3)
            recorder.event("finished", status=outcome, seconds=seconds)
            self._show(stage=outcome, done=True, phase="")
            remove_endpoints(self._directory.path)
            recorder.end_streams()
            await control.stop()
            await asyncio.to_thread(recorder.close)
        return outcome

    async def _open(self, recorder: RunLog, begun: float) -> Mesh | None:
        """Return the mesh, or None after a stop; end the run's records on stop or failure."""
        from services.mesh import open_mesh

        outcome: RunOutcome = "stopped"
        failure: ForgeError | None = None
        self._opening = asyncio.create_task(
            open_mesh(self._spec, self._note(recorder), recorder.span)
        )
        if self._stop_asked:
            self._opening.cancel()
        try:
            return await self._opening
        except asyncio.CancelledError:
            pass
        except Exception as error:
            outcome = "failed"
            failure = error if isinstance(error, ForgeError) else RunError(f"no hosts: {error!r}")
            recorder.event("failed", error=type(error).__name__, message=str(failure))
            self._show(error=str(failure))
        seconds = round(time.perf_counter() - begun, 3)
        recorder.event("finished", status=outcome, seconds=seconds)
        recorder.end_streams()
        await asyncio.to_thread(recorder.close)
        self._show(stage=outcome, done=True)
        if failure is not None:
            raise failure
        return None

    async def _drive(self, recorder: RunLog, mesh: Mesh, helm: RunCommands, begun: float) -> None:
        from training.recipes.registry import teachers

        with teachers(self._spec) as spec:
            await self._drive_with(spec, recorder, mesh, helm, begun)

    async def _drive_with(
        self, spec: RunSpec, recorder: RunLog, mesh: Mesh, helm: RunCommands, begun: float
    ) -> None:
        from services.mesh import spawn_roles
        from training.recipes.registry import open_course
        from training.training_run import TrainingRun

        self._show(stage="starting the mesh")
        course = open_course(spec, mesh, self._directory)
        documents, contexts = course.documents, course.layout.contexts
        sizes = {c: sum(len(documents[name]) for name in of) for c, of in contexts.items()}
        if warning := length_warning(spec.learn.cartridge.tokens, sizes):
            recorder.event("warned", message=warning)
            self._show(message=f"warning: {warning}")
        # It is left from an interrupted run; this one starts from its own checkpoint.
        shutil.rmtree(self._directory.last_state, ignore_errors=True)
        self._directory.last_state.with_suffix(".safetensors").unlink(missing_ok=True)  # older form
        await spawn_roles(
            spec, course.documents, course.layout.contexts, course.end_ids, mesh, self._directory
        )
        for role, pool in mesh.pools.items():
            recorder.event(
                "role_ready",
                role=role,
                replicas=len(pool),
                pids=[pid for r in pool.replicas if r.process for pid in r.process.pids],
                seconds=round(time.perf_counter() - begun, 3),
            )
        self._run = TrainingRun(
            spec, course, mesh, self._directory, recorder, self._show, helm.between_steps
        )  # fmt: skip
        if spec.mesh.hosts.kind == "local":
            self._cpu_before = self._cpu_so_far()
        if self._resume:
            await self._run.resume(self._newest_checkpoint())
        await self._run.go()

    def _cpu_so_far(self) -> CpuSeconds:
        return cpu_seconds(self._client, (self._client, os.getpid()))

    def _cpu(self) -> CpuSeconds | None:
        """Return the processor seconds since all roles stood; None where some are remote."""
        before = self._cpu_before
        return None if before is None else self._cpu_so_far().since(before)

    def _newest_checkpoint(self) -> Path | None:
        from learning.checkpoint import list_checkpoints

        found = list_checkpoints(self._directory.checkpoints)
        return found[-1] if found else None

    async def _last_checkpoint(self, recorder: RunLog) -> None:
        """Save a checkpoint after a stop or a failure, if the trainer still answers."""
        assert self._run is not None
        try:
            await asyncio.wait_for(self._run.checkpoint(), 5.0)
        except (ForgeError, TimeoutError) as error:
            recorder.event("failed", error="checkpoint", message=str(error))

    async def _stop_engines(self, recorder: RunLog, mesh: Mesh) -> None:
        """Shut down vLLM's engines and record their reports."""
        from services.clients import GeneratorClient

        if "generator" not in mesh.pools or self._spec.learn.generator.backend != "vllm":
            return
        try:
            stopping = GeneratorClient(mesh.pools).shut_down()
            reports = await asyncio.wait_for(stopping, ENGINE_STOP_SECONDS)
        except (ForgeError, TimeoutError) as error:
            recorder.event("failed", error="engine", message=str(error))
            return
        for replica, report in enumerate(reports):
            recorder.event("engine", replica=replica, **asdict(report))

    async def _or_failure(self, work: Any, mesh: Mesh) -> None:
        """Await the work, or raise the service's failure."""
        task = asyncio.ensure_future(work)
        await asyncio.wait({task, mesh.service.failure}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=1.0)
            mesh.service.failure.result()
        await task

    def _report_sink(self, sink: str, message: str) -> None:
        """Record a failed telemetry sink; called from any thread."""
        if self._recorder is not None:
            self._loop.call_soon_threadsafe(
                partial(self._recorder.event, "sink_failed", sink=sink, message=message)
            )

    def _note(self, recorder: RunLog) -> Any:
        def note(event: EventName, **facts: Any) -> None:
            recorder.event(event, **facts)
            if event == "replica_lost" and self._run is not None:
                self._run.replica_lost()

        return note

    def _whole_status(self) -> RunStatus:
        pools = () if self._mesh is None else self._mesh.pools.values()
        return replace(self._status, pools=tuple(p.status() for p in pools))

    def _show(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
