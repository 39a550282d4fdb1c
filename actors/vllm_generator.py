"""VllmGeneratorActor: the generator on vLLM; the engine steps in a thread of this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from monarch.actor import Actor, concurrent_endpoint

from actors.engine_thread import Engine, EngineThread
from actors.setup import VLLM_REMEDY, BaseModel, missing_vllm
from protocols.errors import RunError
from protocols.learn_spec import GeneratorSpec
from protocols.ports import TensorPlane
from protocols.types import Completion, EngineReport, Generated, GenerateRequest, Snapshot


class VllmGeneratorActor(Actor):
    """One replica of the `Generate` port, as GeneratorActor is; many calls may be in flight.

    Needs a process of its own: vLLM reads the environment and keeps global state.
    """

    def __init__(
        self,
        base: BaseModel,
        end_ids: frozenset[int],
        keep_versions: int,
        spec: GeneratorSpec,
    ) -> None:
        torch.set_num_threads(base.threads)
        os.environ.update(environment(base))
        self._plane = base.plane

        def build() -> Engine:
            if missing_vllm():
                raise RunError(f"this generator needs vLLM, which is not installed: {VLLM_REMEDY}")
            from actors.vllm_engine import VllmEngine  # reads the environment: not before

            return VllmEngine(base.path, base.dtype, base.documents, end_ids, spec)

        self._engine = EngineThread(build, keep_versions, spec.in_flight)

    @concurrent_endpoint
    async def ready(self) -> int:
        """This process's id, once the engine serves."""
        await asyncio.wrap_future(self._engine.started)
        return os.getpid()

    @concurrent_endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Tensors pass over this plane from now on: the one before was lost."""
        self._plane = plane

    @concurrent_endpoint
    async def load(self, snapshot: Snapshot) -> int:
        """Take a published version from the tensor plane; requests may name it from now on.

        With `in_flight: drain` it first waits for the requests in flight, and later ones for it.
        """
        tensors = await self._plane.get(snapshot.packet)
        held = self._engine.hold(snapshot.version, snapshot.names, tensors["kv"])
        return await asyncio.wrap_future(held)

    @concurrent_endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> Generated:
        """Completions in the order of the requests; raises DataError for a malformed one."""
        begun = time.perf_counter()
        futures = [asyncio.wrap_future(self._engine.submit(r)) for r in requests]
        results = await asyncio.gather(*futures, return_exceptions=True)
        done: list[Completion] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            done.append(result)
        return Generated(time.perf_counter() - begun, tuple(done))

    @concurrent_endpoint
    async def report(self) -> EngineReport:
        return await asyncio.wrap_future(self._engine.report())

    @concurrent_endpoint
    async def shut_down(self) -> EngineReport:
        """Stop the engine and its processes; the last report."""
        return await asyncio.wrap_future(self._engine.close())


def environment(base: BaseModel) -> dict[str, str]:
    """What vLLM and torch read from the environment, before either is told anything else."""
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core steps in this process
        # vLLM 0.32 has two model runners; on CPUs it takes this one. What is tested is what runs.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the mesh says how many threads; none has a core
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "VLLM_HOST_IP": "127.0.0.1",  # all processes of an engine are on this host
    }
    if Path(base.path).is_dir():
        chosen["HF_HUB_OFFLINE"] = "1"
    if not torch.cuda.is_available():
        # Compiling takes a CPU longer than it ever wins back (9-50 s before the first token).
        chosen["TORCHDYNAMO_DISABLE"] = "1"
    return chosen
