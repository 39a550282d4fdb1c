"""ControllerActor: supervises the roles and drives one run from start, or a checkpoint, to results.

    spawn roles -> evaluate none, document, untrained
                -> train on policy (services.loop) -> evaluate
                -> train offline on as many tokens -> evaluate -> results

It owns every role's process mesh, so a death anywhere reaches `__supervise__` here and ends the
run with the role's name, a checkpoint and a summary, never with a hang. This module imports no
torch, so that the client that spawns it needs none.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import Actor, MeshFailure, concurrent_endpoint

from protocols.errors import CheckpointError, ForgeError, RunError
from protocols.records import RunOutcome
from protocols.spec import RunSpec
from protocols.status import RunStatus
from services.rundir import RunDirectory

if TYPE_CHECKING:
    from services.run import Run

ENGINE_STOP_SECONDS = 10.0  # an idle engine stops in 1 to 2 s


class ControllerActor(Actor):
    """One run. `run` returns when it has ended; `status` and `ask_to_stop` answer meanwhile."""

    def __init__(self, spec: RunSpec, run_path: str, resume: bool) -> None:
        self._spec = spec
        self._directory = RunDirectory(Path(run_path))
        self._resume = resume
        self._status = RunStatus()
        self._deaths: list[str] = []
        self._run: Run | None = None
        self._stopping = False

    def __supervise__(self, failure: MeshFailure) -> bool:
        """A process or actor that we own died: note it, and keep this actor alive to say so."""
        self._deaths.append(str(failure))
        return True

    @concurrent_endpoint
    async def status(self) -> RunStatus:
        return self._status

    @concurrent_endpoint
    async def ask_to_stop(self) -> None:
        """End after the step in progress, with a checkpoint and results so far."""
        self._stopping = True
        self._show(message="stopping after this step")

    @concurrent_endpoint
    async def run(self) -> str:
        """Drive the run; returns its status "finished", "stopped" or raises what failed it."""
        from services.roles import Mesh
        from services.run import Stopped

        self._mesh = Mesh()
        begun = time.perf_counter()
        event = self._directory.append_event
        event("run_started", resumed=self._resume, mesh=self._spec.mesh.name)
        outcome: RunOutcome = "failed"
        try:
            await self._or_death(self._drive(begun))
            outcome = "finished"
        except Stopped:
            outcome = "stopped"
        except Exception as error:
            message = str(error) if isinstance(error, ForgeError) else f"{error!r}"
            event("failed", error=type(error).__name__, message=message)
            self._show(error=message)
            if isinstance(error, ForgeError):
                raise
            raise RunError(f"the run failed on {message}") from error
        finally:
            if self._run is not None:
                if outcome != "finished":
                    await self._last_checkpoint()
                self._run.write_results(outcome, time.perf_counter() - begun)
            await self._stop_engines()
            await self._mesh.stop()
            event("finished", status=outcome, seconds=round(time.perf_counter() - begun, 3))
            self._show(stage=outcome, done=True, phase="")
        return outcome

    async def _drive(self, begun: float) -> None:
        from learning.model import load_tokenizer
        from services.roles import spawn_mesh
        from services.run import Run
        from services.tasks import Tasks, read_patients

        self._show(stage="starting the mesh")
        learn = self._spec.learn
        tasks = Tasks(learn, read_patients(learn.data), load_tokenizer(learn.model.path))
        exams = tasks.exams if learn.evaluate.arms else []
        await spawn_mesh(self._spec, tasks.documents, tasks.end_ids, self._mesh)
        for role, pool in self._mesh.pools.items():
            seconds = round(time.perf_counter() - begun, 3)
            self._directory.append_event(
                "role_ready",
                role=role,
                replicas=len(pool),
                pids=self._mesh.pids[role],
                seconds=seconds,
            )
        self._run = Run(
            self._spec, tasks, exams, self._mesh, self._directory, self._show, self._should_stop
        )
        if self._resume:
            await self._run.resume(self._newest_checkpoint())
        await self._run.go()

    def _newest_checkpoint(self) -> Path:
        from learning.checkpoint import list_checkpoints

        found = list_checkpoints(self._directory.checkpoints)
        if not found:
            raise CheckpointError(
                f"{self._directory.path} has no checkpoint to resume from; start anew without "
                "--resume"
            )
        return found[-1]

    async def _last_checkpoint(self) -> None:
        """After a stop or a failure: keep what is there, if the trainer still answers."""
        assert self._run is not None
        try:
            await asyncio.wait_for(self._run.checkpoint(), 5.0)
        except (ForgeError, TimeoutError) as error:
            self._directory.append_event("failed", error="checkpoint", message=str(error))

    async def _stop_engines(self) -> None:
        """Shut vLLM's engines down in order, and note what they did."""
        generators = self._mesh.pools.get("generator")
        if generators is None or self._spec.learn.generator.backend != "vllm":
            return

        async def stop(replica: int) -> None:
            try:
                answer = generators.call(replica, "shut_down")
                report = await asyncio.wait_for(answer, ENGINE_STOP_SECONDS)
            except (ForgeError, TimeoutError) as error:
                self._directory.append_event(
                    "failed", error="engine", replica=replica, message=str(error)
                )
            else:
                self._directory.append_event("engine", replica=replica, **asdict(report))

        await asyncio.gather(*(stop(i) for i in range(len(generators))))

    async def _or_death(self, work: Any) -> None:
        """Await the work, or raise RunError soon after a process that we own has died."""
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait({task}, timeout=0.25)
            if self._deaths and not task.done():
                # The call that was talking to the dead has its own, clearer error: let it speak.
                await asyncio.wait({task}, timeout=3.0)
                if not task.done():
                    task.cancel()
                    await asyncio.wait({task}, timeout=1.0)
                    raise RunError(f"a process of the mesh died: {first_line(self._deaths[0])}")
        await task

    def _should_stop(self) -> bool:
        return self._stopping

    def _show(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)


def first_line(text: str) -> str:
    return text.strip().splitlines()[0][:300] if text.strip() else "no message"
