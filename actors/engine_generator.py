"""Run a generation engine, vLLM's, llama.cpp's or the embedded one, in a thread of this process.

Many calls are in flight at a time; each request ends in its own time, may be streamed, and may be
cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from monarch.actor import Actor, concurrent_endpoint
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cartridge_forge.actors.base import VLLM_REMEDY, ModelSource, missing_vllm
from cartridge_forge.learning.cartridge import get_missing, since_of
from cartridge_forge.learning.model.loading import (
    flush_denormals,
    require_weights,
    text_of,
    tokenizer_of,
)
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.decoding.engine import TorchEngine
from cartridge_forge.plugins.decoding.engine_thread import Engine, EngineThread, Told
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.protocols.errors import PublishError, RunError
from cartridge_forge.protocols.ports import EngineReport, TensorPlane, TokenChunk, TokenPort
from cartridge_forge.protocols.spec.sections import GeneratorSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Completion,
    GenerateOutput,
    GenerateRequest,
)

REPLY_SECONDS = 2.0  # for the replies of an engine that died to reach their callers
TELL_SECONDS = 0.02  # between two messages with later tokens of streams


class EngineGeneratorActor(Actor):
    """Run one replica of the `Generate` port, as GeneratorActor does; many calls may be in flight.

    It needs a process of its own: vLLM reads the environment and keeps global state.
    """

    # What shows the numbers that it decoded over (`services.roles.generator_evidence`).
    evidence: ClassVar[frozenset[str]] = frozenset({"fingerprint", "logprobs"})

    def __init__(
        self,
        base: ModelSource,
        end_ids: frozenset[int],
        keep_versions: int,
        spec: GeneratorSpec,
    ) -> None:
        torch.set_num_threads(base.threads)
        if spec.backend == "vllm":
            os.environ.update(environment(base))
        self._plane = base.plane
        build = partial(build_engine, base, end_ids, spec)
        self._engine = EngineThread(build, keep_versions, spec.in_flight, end_process)
        self._buffers: dict[str, StreamBuffer] = {}  # by the key of their port

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id, once the engine serves."""
        await asyncio.wrap_future(self._engine.started)
        return os.getpid()

    @concurrent_endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Pass tensors over this plane from now on: the previous one was lost."""
        self._plane = plane

    @concurrent_endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        """Load what is not held of a published version from the tensor plane; requests may name the
        version from now on.

        With `in_flight: drain` it first waits for the requests in flight, and later ones wait for
        it.
        """
        since = since_of(snapshot.cartridges)
        missing = await asyncio.wrap_future(self._engine.missing(since))
        new = await get_missing(self._plane.get, snapshot.cartridges, missing)
        return await asyncio.wrap_future(self._engine.hold(snapshot.version, since, new))

    @concurrent_endpoint
    async def load_file(self, version: int, name: str, path: str) -> int:
        """Load one cartridge, "kv" [L, 2, H_kv, P, D] of a safetensors file, as a version of its
        own. Raises PublishError for a file without one, or one that does not fit the model."""
        kv = await asyncio.to_thread(read_cartridge, path)
        loading = self._engine.hold(version, {name: version}, {name: kv})
        return await asyncio.wrap_future(loading)

    @concurrent_endpoint
    async def drop(self, version: int) -> None:
        """Stop serving a version, after the requests in flight over it have ended."""
        await asyncio.wrap_future(self._engine.drop(version))

    @concurrent_endpoint
    async def generate(
        self, requests: Sequence[GenerateRequest], stream: TokenPort | None = None
    ) -> GenerateOutput:
        """Return completions in the order of the requests. Raises DataError for a malformed one.

        `stream` gets lists of `TokenChunk` during sampling. The last tokens of a request may come
        with its completion alone.
        """
        start = time.perf_counter()
        with self._told(requests, stream) as add:
            futures = [asyncio.wrap_future(self._engine.submit(r, add)) for r in requests]
            results = await asyncio.gather(*futures, return_exceptions=True)
        completions: list[Completion] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            completions.append(result)
        return GenerateOutput(time.perf_counter() - start, tuple(completions))

    @concurrent_endpoint
    async def cancel(self, ids: Collection[str]) -> None:
        """End the requests of these ids, where this replica has them."""
        await asyncio.wrap_future(self._engine.cancel(ids))

    @concurrent_endpoint
    async def report(self) -> EngineReport:
        return await asyncio.wrap_future(self._engine.report())

    @contextlib.contextmanager
    def _told(
        self, requests: Sequence[GenerateRequest], stream: TokenPort | None
    ) -> Iterator[Told | None]:
        """Yield what sends the tokens of a call's requests to its port."""
        if stream is None:
            yield None
            return
        buffer = self._buffers.setdefault(stream.key, StreamBuffer(stream.port))
        buffer.calls += 1
        try:
            yield buffer.add
        finally:
            buffer.end(requests)
            buffer.calls -= 1
            if not buffer.calls:
                del self._buffers[stream.key]

    @concurrent_endpoint
    async def shut_down(self) -> EngineReport:
        """Stop the engine and its processes, and return its last report."""
        return await asyncio.wrap_future(self._engine.close())


def end_process() -> None:
    """End this process REPLY_SECONDS from now. The pool replaces it as soon as a call tells that
    the engine died; where no call is in flight, or no memory is left to reply, its end does."""
    time.sleep(REPLY_SECONDS)  # in the engine's own thread: there may be no memory for another
    os._exit(1)


class StreamBuffer:
    """Send the tokens of several calls to a port: those of a step that begins a response at once,
    with all that has come until then, and later ones with the first step that ends TELL_SECONDS
    after the message before. A message for every token would cost more than the token, and so
    would waking the event loop for it."""

    def __init__(self, port: Any) -> None:
        self.calls = 0
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # guards what follows
        self._gathered: dict[str, TokenChunk] = {}  # by request
        self._due = False  # the event loop is to send them
        self._sent = 0.0

    def add(self, chunks: Sequence[TokenChunk]) -> None:
        """Add a step's chunks; called from the engine's thread."""
        with self._lock:
            for chunk in chunks:
                previous = self._gathered.get(chunk.request_id)
                if previous is not None:
                    chunk = replace(
                        previous,
                        token_ids=previous.token_ids + chunk.token_ids,
                        logprobs=previous.logprobs + chunk.logprobs,
                        top_logprobs=previous.top_logprobs + chunk.top_logprobs,
                    )
                self._gathered[chunk.request_id] = chunk
            late = self._loop.time() >= self._sent + TELL_SECONDS
            if self._due or not (late or any(not chunk.first for chunk in chunks)):
                return
            self._due = True
        self._loop.call_soon_threadsafe(self._send)

    def end(self, requests: Sequence[GenerateRequest]) -> None:
        """Forget what is left of requests that have ended: their completions have it."""
        with self._lock:
            for request in requests:
                self._gathered.pop(request.id, None)

    def _send(self) -> None:
        with self._lock:
            gathered, self._gathered, self._due = self._gathered, {}, False
            self._sent = self._loop.time()
        if gathered:
            self._port.send([*gathered.values()])


def build_engine(base: ModelSource, end_ids: frozenset[int], spec: GeneratorSpec) -> Engine:
    """Return the engine of a spec, for an EngineThread. Raises RunError when its package is
    missing."""
    text, grammars = text_of(base.path), Grammars(partial(tokenizer_of, base.path), end_ids)
    if spec.backend == "vllm":
        if missing_vllm():
            raise RunError(f"this generator needs vLLM, which is not installed: {VLLM_REMEDY}")
        from cartridge_forge.plugins.vllm.engine import (
            VllmEngine,  # reads the environment: not before
        )

        require_weights(base.path)
        return VllmEngine(base.path, base.dtype, base.documents, end_ids, spec, text, grammars)
    if spec.backend == "llama.cpp":
        from cartridge_forge.plugins.llama_cpp.engine import LlamaEngine

        return LlamaEngine(
            base.path, base.dtype, base.threads, base.documents, end_ids, text, grammars,
            kv_gib=spec.kv_gib, max_kv_bytes=base.max_kv_bytes,
        )  # fmt: skip
    flush_denormals()
    model = base.load()
    model.pack()
    cache = base.document_cache(partial(document_kv, model))
    return TorchEngine(model, cache.get, end_ids, text, grammars, add_document=cache.add)


def read_cartridge(path: str) -> Tensor:
    """Return "kv" [L, 2, H_kv, P, D] of a safetensors file, or raise PublishError."""
    try:
        return load_file(path)["kv"]
    except (OSError, SafetensorError, KeyError) as error:
        raise PublishError(f"{path} holds no cartridge: {error!r}; upload it again") from error


def environment(base: ModelSource) -> dict[str, str]:
    """Return the environment variables that vLLM and torch must find before they start."""
    chosen = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core steps in this process
        # vLLM 0.32 has two model runners; this is its choice on CPUs, so GPUs run the tested path.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # ours draws the tokens; FlashInfer would compile one
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the mesh sets the number of threads, unpinned
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
