"""Supervise the roles and drive one run from its start, or a checkpoint, to results.

    spawn roles -> train on policy (training.loop) -> evaluate
                -> evaluate none, document
                -> evaluate untrained -> train offline on as many tokens -> evaluate -> results

A run without the arm offline evaluates the untrained cartridges before it trains.

ControllerActor owns the process mesh of every role, so every death reaches its `__supervise__`. The
service (services.pool.service) replaces dead replicas. The run fails only when a role has used up
its restarts: with the role's name, a checkpoint and a summary. This module imports no torch, so the
client that spawns it needs none.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, MeshFailure, concurrent_endpoint

from cartridge_forge.protocols.errors import ForgeError, RunError, StopRequested
from cartridge_forge.protocols.layout import length_warning
from cartridge_forge.protocols.plugins import optional, resolve
from cartridge_forge.protocols.records.run_files import EventName, RunOutcome
from cartridge_forge.protocols.records.status import RunStatus
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.pool.sizes import PoolSize, opening, restore
from cartridge_forge.services.proc_info import CpuSeconds, cpu_seconds
from cartridge_forge.services.run_directory import (
    Position,
    ResumePoint,
    RunDirectory,
    resume_point,
    storage_error,
)

if TYPE_CHECKING:
    from cartridge_forge.services.mesh import Mesh
    from cartridge_forge.services.run_log import RunLog, RunObserver
    from cartridge_forge.training.training_run import TrainingRun

STARTING = "starting the mesh"
# The limits of an ending's steps, 28 s in all. An idle engine stops in 1 to 2 s.
ENGINE_STOP_SECONDS, MESH_STOP_SECONDS, SINK_SECONDS = 8.0, 8.0, 6.0


class ControllerActor(Actor):
    """Run one spec: `run` returns when it ends; `status` and `ask_to_stop` answer meanwhile.
    `client` is the id of the process that started this one's. `sizes` are those that the pools of
    a resumed run have besides the spec's."""

    def __init__(
        self,
        spec: RunSpec,
        run_path: str,
        resume: bool,
        client: int,
        sizes: Sequence[PoolSize] = (),
    ) -> None:
        self._spec, self._sizes = opening(spec, sizes), sizes
        self._client = client
        self._cpu_before: CpuSeconds | None = None
        self._directory = RunDirectory(Path(run_path))
        self._resume = resume
        self._status = RunStatus()
        self._mesh: Mesh | None = None
        self._run: TrainingRun | None = None
        self._observer: RunObserver | None = None
        self._stop_requested = False
        self._opening: asyncio.Task[Mesh] | None = None
        self._recorder: RunLog | None = None
        self._whole: Position | None = None  # up to where the rows are; None for all
        self._notes: list[str] = []  # what was healed, and warnings

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Return whether the service handles the death of an owned process or actor."""
        return self._mesh is None or self._mesh.service.noticed(failure)

    @concurrent_endpoint
    async def process(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def status(self) -> tuple[RunStatus, Sequence[str]]:
        """Return the status, and lines that the user reads once, more as they come."""
        return self._whole_status(), self._notes

    @concurrent_endpoint
    async def ask_to_stop(self) -> None:
        """End the run after the step in progress, with a checkpoint and the results so far."""
        self._stop_requested = True
        if self._mesh is None and self._opening is not None:  # hosts may wait in a queue for hours
            self._opening.cancel()
        elif self._observer is not None:
            await self._observer.stop_run()

    @concurrent_endpoint
    async def run(self) -> str:
        """Drive the run; return "finished" or "stopped". Raises a ForgeError when the run fails."""
        start = time.perf_counter()
        self._loop = asyncio.get_running_loop()
        outcome: RunOutcome = "failed"
        fault: BaseException | None = None
        try:
            recorder = self._open_records()
            mesh = self._mesh = await self._open(recorder)
            await self._start_observer(recorder, mesh)
            await self._or_failure(self._drive(recorder, mesh, start), mesh)
            outcome = "finished"
        except StopRequested:
            outcome = "stopped"
        except BaseException as error:  # Monarch's own panics are no Exceptions
            fault = error
            if self._recorder is not None:
                failure = self._failure(error)
                self._recorder.event("failed", error=type(error).__name__, message=str(failure))
        fault = await self._end(outcome, start) or fault
        failed = None if fault is None else self._failure(fault)
        stage = outcome if failed is None else "failed"
        self._show(stage=stage, error=failed and str(failed), done=True, phase="")
        if failed is not None:
            raise failed from fault
        return outcome

    def _open_records(self) -> RunLog:
        """Heal the run's files before anything is appended; return the open log."""
        from cartridge_forge.services.run_log import NoSink, RunLog

        if self._resume:
            self._whole, self._notes = self._directory.heal()
        self._directory.require_room()
        telemetry = self._spec.mesh.telemetry
        wanted = telemetry.sinks or telemetry.metrics is not None
        observe = (resolve if wanted else optional)("hooks", "observer")
        if observe is not None:
            self._observer = observe(self._spec, self._directory, self._report_sink)
        sink = NoSink() if self._observer is None else self._observer.sink
        recorder = self._recorder = RunLog(self._directory, sink)
        recorder.event(
            "run_started", resumed=self._resume, mesh=self._spec.mesh.name, pid=os.getpid()
        )
        for line in self._notes:
            recorder.event("healed", message=line)
        return recorder

    async def _start_observer(self, recorder: RunLog, mesh: Mesh) -> None:
        if self._observer is None:
            return
        from cartridge_forge.services.run_log import ObservedRun

        await self._observer.start(
            ObservedRun(recorder, mesh.pools, self._whole_status, self._show, mesh.service.scale)
        )
        if self._stop_requested:
            await self._observer.stop_run()

    async def _between_steps(self, checkpoint: Callable[[], Awaitable[str]]) -> None:
        """Carry out the commands that arrived. Raises StopRequested after a stop."""
        if self._observer is not None:
            await self._observer.between_steps(checkpoint)
        if self._stop_requested:
            raise StopRequested

    def _failure(self, error: BaseException) -> ForgeError:
        """Return the error that a user reads."""
        if isinstance(error, OSError):
            checkpoints = sorted(self._directory.checkpoints.glob("version-*"))
            kept_text = f"checkpoint {checkpoints[-1].name}" if checkpoints else "no checkpoint"
            return storage_error(error, self._directory.path, kept_text)
        if isinstance(error, ForgeError):
            lacking = () if self._mesh is None else self._mesh.service.lacking()
            if not lacking or not isinstance(error, RunError):
                return error
            return RunError("; ".join([str(error), *lacking]))  # often its cause
        what = "no hosts:" if self._mesh is None else "the run failed on"
        return RunError(f"{what} {error!r}")

    async def _end(self, outcome: RunOutcome, start: float) -> BaseException | None:
        """Take down everything that was opened, and record how the run ended. Returns the error of
        results that could not be written."""
        recorder, mesh, run = self._recorder, self._mesh, self._run
        ending = RunEnding()
        unwritten: BaseException | None = None
        if self._observer is not None:
            await ending.do("run commands", self._observer.end_commands)
        if run is not None:
            if outcome != "finished":
                await ending.do("last checkpoint", run.checkpoint)
            seconds = time.perf_counter() - start
            results = partial(run.write_results, outcome, seconds, self._cpu())
            unwritten = await ending.do("results", results)
        if self._observer is not None:
            self._observer.end_watch()
        if recorder is not None:
            if mesh is not None:
                engines = partial(self._stop_engines, recorder, mesh)
                await ending.do("engines", engines, ENGINE_STOP_SECONDS)
                await ending.do("processes", mesh.stop, MESH_STOP_SECONDS)
            for message in ending.failures:
                recorder.event("failed", error="ending", message=message)
            seconds = round(time.perf_counter() - start, 3)
            recorder.event("finished", status=outcome, seconds=seconds)
        await ending.do("reserve", self._directory.free_room)
        for name, close in self._observer.closings() if self._observer is not None else ():
            await ending.do(name, close)
        if recorder is not None:
            await ending.do("sinks", partial(asyncio.to_thread, recorder.close), SINK_SECONDS)
        return unwritten

    async def _open(self, recorder: RunLog) -> Mesh:
        """Return the mesh. Raises StopRequested after a stop."""
        from cartridge_forge.services.mesh import open_mesh

        self._opening = asyncio.create_task(
            open_mesh(self._spec, self._note(recorder), recorder.span)
        )
        if self._stop_requested:
            self._opening.cancel()
        try:
            return await self._opening
        except asyncio.CancelledError:
            raise StopRequested from None

    async def _drive(self, recorder: RunLog, mesh: Mesh, start: float) -> None:
        if not self._spec.learn.roles_here:  # no teacher of a plug-in's own
            await self._drive_with(self._spec, recorder, mesh, start)
            return
        with resolve("hooks", "local_teachers")(self._spec) as spec:
            await self._drive_with(spec, recorder, mesh, start)

    async def _drive_with(self, spec: RunSpec, recorder: RunLog, mesh: Mesh, start: float) -> None:
        from cartridge_forge.services.mesh import spawn_roles
        from cartridge_forge.training.recipe import open_recipe
        from cartridge_forge.training.training_run import TrainingRun

        self._show(stage=STARTING)
        # Long documents take seconds to read, in which the client and the health check ask.
        recipe = await asyncio.to_thread(open_recipe, spec, mesh, self._directory)
        if recipe.note:
            self._warn(recipe.note)
        documents, contexts = recipe.documents, recipe.layout.contexts
        sizes = {c: sum(len(documents[name]) for name in names) for c, names in contexts.items()}
        if warning := length_warning(spec.learn.cartridge.tokens, sizes):
            self._warn(warning)
        point = self._point(recorder) if self._resume else ResumePoint()
        if point.state is None:  # what is left of an interrupted run is not gone on from
            shutil.rmtree(self._directory.last_state, ignore_errors=True)
            self._directory.run_state.unlink(missing_ok=True)
        self._directory.last_state.with_suffix(".safetensors").unlink(missing_ok=True)  # older form
        telling = asyncio.create_task(self._tell_preparation(recorder, mesh))
        try:
            await spawn_roles(
                spec, recipe.documents, recipe.layout.contexts, recipe.end_ids, mesh,
                self._directory,
            )  # fmt: skip
        finally:
            telling.cancel()
        self._show(stage=STARTING, phase="")
        await restore(self._sizes, mesh.service.scale, recorder.event, self._warn)
        for role, pool in mesh.pools.items():
            recorder.event(
                "role_ready",
                role=role,
                replicas=len(pool),
                pids=[pid for r in pool.replicas if r.process for pid in r.process.pids],
                seconds=round(time.perf_counter() - start, 3),
            )
        run = TrainingRun(
            spec, recipe, mesh, self._directory, recorder, self._show, self._warn,
            self._between_steps,
        )  # fmt: skip
        if spec.mesh.hosts.kind == "local":
            self._cpu_before = self._cpu_so_far()
        if self._resume:
            await run.resume(point)  # until it is restored it has nothing to write
        self._run = run
        await run.go()

    async def _tell_preparation(self, recorder: RunLog, mesh: Mesh) -> None:
        """Show how far the trainer has prepared its cartridges, with each heartbeat."""
        open_progress = optional("hooks", "preparation_progress")
        if open_progress is None:
            return
        progress = open_progress()
        while True:
            await asyncio.sleep(self._spec.mesh.health.heartbeat_s)
            if not progress.moved(mesh.preparation, time.monotonic()):
                continue
            self._show(stage=progress.stage, phase=progress.phase)
            if progress.is_event:
                recorder.event(
                    "preparing", cartridges=progress.cartridges, total=progress.total,
                    seconds_left=progress.seconds_left,
                )  # fmt: skip

    def _cpu_so_far(self) -> CpuSeconds:
        return cpu_seconds(self._client, (self._client, os.getpid()))

    def _cpu(self) -> CpuSeconds | None:
        """Return the processor seconds since all roles stood; None where some are remote."""
        previous = self._cpu_before
        return None if previous is None else self._cpu_so_far().since(previous)

    def _point(self, recorder: RunLog) -> ResumePoint:
        """Return where the run goes on: at the trainer's last state, or at the newest checkpoint
        that is whole and whose rows are. Tells of newer ones."""
        from cartridge_forge.learning.checkpoint import newest_whole
        from cartridge_forge.services.roles import last_state_here

        usable = partial(self._directory.stands, position=self._whole)
        checkpoint, passed = newest_whole(self._directory.checkpoints, usable)
        for line in passed:
            recorder.event("healed", message=line)
        has_state = last_state_here(self._spec)
        point = (
            resume_point(self._directory, checkpoint, self._whole)
            if has_state
            else ResumePoint(checkpoint)
        )
        self._notes += [*passed, f"going on {point}"]
        return point

    async def _stop_engines(self, recorder: RunLog, mesh: Mesh) -> None:
        """Shut down vLLM's engines and record their reports."""
        from cartridge_forge.services.clients import GeneratorClient

        if "generator" not in mesh.pools or self._spec.learn.generator.backend != "vllm":
            return
        for replica, report in enumerate(await GeneratorClient(mesh.pools).shut_down()):
            recorder.event("engine", replica=f"generator[{replica}]", **asdict(report))

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

    def _warn(self, message: str) -> None:
        """Tell the user, in the run's events and above the panel, of what is probably not meant."""
        assert self._recorder is not None
        self._recorder.event("warned", message=message)
        self._notes.append(f"warning: {message}")

    def _whole_status(self) -> RunStatus:
        if self._mesh is None:
            return self._status
        pools = tuple(pool.status() for pool in self._mesh.pools.values())
        messages = filter(None, [self._status.message, *self._mesh.service.lacking()])
        return replace(self._status, pools=pools, message="; ".join(messages))

    def _show(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)


class RunEnding:
    """Run the steps that end a run, and collect in `failures` those that failed or took too long.
    A disk without room, a directory that was removed or a process that hangs stops none of the
    others."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    async def do(
        self, what: str, step: Callable[[], Awaitable[object] | object], limit_s: float = 5.0
    ) -> BaseException | None:
        """Run one step within `limit_s` seconds; return its error, None for none. A step that is
        no coroutine is not interrupted."""
        try:
            async with asyncio.timeout(limit_s):
                result = step()
                if inspect.isawaitable(result):
                    await result
        except BaseException as error:  # Monarch's own panics are no Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            late = isinstance(error, TimeoutError) and not str(error)
            why = f"not done within {limit_s:g} s" if late else str(error) or repr(error)
            self.failures.append(f"{what}: {why}")
            return error
        return None
