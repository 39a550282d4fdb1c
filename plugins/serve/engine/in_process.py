"""Give scripts a `Sampler` over a model in this process, by any engine, without a mesh.

with local_sampler("models/clinic-panel", document=chart) as sampler:
    RSAEngine(sampler, N=8, K=4, T=3, task="clinic").run([question])
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from pathlib import Path

from cartridge_forge.actors.base import ModelSource, NoPlane, keep_freed_memory
from cartridge_forge.actors.engine_generator import (
    build_engine,
    environment,
    read_cartridge,
)
from cartridge_forge.learning.model.loading import checked_model, load_tokenizer
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.decoding.engine_thread import EngineThread
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.spec.sections import Backend, GeneratorSpec
from cartridge_forge.protocols.step import NO_DOCUMENT, Completion, GenerateRequest, PrefixRef

DOCUMENT = "document"
START_SECONDS = 600.0  # a GPU's engine may compile first
STOP_SECONDS = 30.0
MAX_KV_BYTES = 1 << 33


@contextmanager
def local_sampler(
    model: str,
    *,
    backend: Backend = "torch",
    dtype: str = "float32",
    document: str | None = None,
    cartridge: Path | None = None,
    threads: int = 1,
    kv_gib: float = 1.0,
    date: datetime | None = None,
) -> Iterator[TokenSampler]:
    """Yield a sampler over `model`, a directory or a hub id, with the whole `document` before every
    conversation, or a cartridge of it: "kv" [L, 2, H_kv, P, D] of a safetensors file. `date` is the
    one that the chat template may write, None for now.

    vLLM reads the environment once, so a process can have one such engine. Raises DataError,
    PublishError for a cartridge of another model, RunError for an engine that cannot start.
    """
    with local_samplers(
        model, backend=backend, dtype=dtype, document=document, cartridge=cartridge,
        threads=threads, kv_gib=kv_gib, date=date,
    ) as arms:  # fmt: skip
        yield list(arms.values())[0 if cartridge is None and document is None else 1]


@contextmanager
def local_samplers(
    model: str,
    *,
    backend: Backend = "torch",
    dtype: str = "float32",
    document: str | None = None,
    cartridge: Path | None = None,
    threads: int = 1,
    kv_gib: float = 1.0,
    date: datetime | None = None,
) -> Iterator[Mapping[str, TokenSampler]]:
    """Yield the samplers of one engine by arm, in this order: `none`, `cartridge` and `document`
    where they are given. Raises as `local_sampler` does."""
    keep_freed_memory()
    spec = GeneratorSpec(backend=backend, kv_gib=kv_gib)
    verdict = checked_model(model) if backend == "torch" else None  # others compute by themselves
    conversation = ChatRenderer(load_tokenizer(model), {DOCUMENT: document or "-"}, date)
    documents = {NO_DOCUMENT: conversation.head(None)}
    if document is not None:
        documents[DOCUMENT] = conversation.head(DOCUMENT)
    base = ModelSource(model, dtype, threads, documents, MAX_KV_BYTES, NoPlane(), verdict=verdict)
    if backend == "vllm":
        os.environ.update(environment(base))
    build = partial(build_engine, base, conversation.end_ids, spec)
    engine = EngineThread(build, 1, spec.in_flight)
    try:
        engine.started.result(START_SECONDS)

        async def generate(requests: Sequence[GenerateRequest]) -> list[Completion]:
            return await asyncio.gather(*(asyncio.wrap_future(engine.submit(r)) for r in requests))

        def sampler_of(document: str | None, prefix: str) -> TokenSampler:
            return TokenSampler(generate, conversation, document, PrefixRef(prefix, 0))

        arms = {NO_DOCUMENT: sampler_of(None, f"document/{NO_DOCUMENT}")}
        if cartridge is not None:
            kv = read_cartridge(str(cartridge))
            engine.hold(0, {DOCUMENT: 0}, {DOCUMENT: kv}).result(START_SECONDS)
            arms["cartridge"] = sampler_of(DOCUMENT, f"cartridge/{DOCUMENT}")
        if document is not None:
            arms["document"] = sampler_of(DOCUMENT, f"document/{DOCUMENT}")
        yield arms
    finally:
        engine.close().result(STOP_SECONDS)
