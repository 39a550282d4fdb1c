"""Run the frozen model as a generator of whole batches of completions.

`actors.engine_generator` serves requests that arrive and end at any time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import ClassVar

import torch
from monarch.actor import endpoint
from torch import Tensor

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.actors.model import ModelActor
from cartridge_forge.learning.cartridge import (
    CartridgeVersions,
    Fingerprints,
    composed,
    since_of,
)
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.draws import GrammarCompiler
from cartridge_forge.learning.model.loading import (
    text_of,
    tokenizer_of,
)
from cartridge_forge.learning.ranks import engine_errors
from cartridge_forge.learning.teacher import (
    document_kv,
)
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    GenerateOutput,
    GenerateRequest,
    PrefixRef,
    unique_key,
)


class GeneratorActor(ModelActor):
    """Run one replica of the `Generate` port. Holds the last few published versions.

    Prefix names: "cartridge/<document>" for a published version, "document/<document>" for a
    document's own KV. A request may name an ordered composition of them.
    """

    # What shows the numbers that it decoded over (`services.roles.generator_evidence`).
    evidence: ClassVar[frozenset[str]] = frozenset({"fingerprint", "logprobs"})

    def __init__(self, base: ModelSource, end_ids: frozenset[int], keep_versions: int) -> None:
        super().__init__(base)
        self._cartridges = CartridgeVersions(keep_versions)
        self._fingerprints = Fingerprints()
        self._model.pack()
        self._end_ids = end_ids
        self._text = text_of(base.path)
        read = partial(tokenizer_of, base.path)
        self._grammars: Callable[[], GrammarCompiler] = cache(
            lambda: resolve("hooks", "grammars")(read, end_ids)
        )
        self._documents = base.document_cache(partial(document_kv, self._model))

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        """Load what is not held of a published version from the tensor plane; requests may name the
        version from now on."""
        new = await self._cartridges.fetch(self._plane.get, snapshot.cartridges, self._model)
        self._cartridges.add(snapshot.version, since_of(snapshot.cartridges), new)
        return snapshot.version

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        start = time.perf_counter()
        grammars = self._grammars() if any(r.grammar is not None for r in requests) else None
        drawn_from: list[Tensor] = []
        with engine_errors():
            completions = generate(
                self._model, requests, self._lookup, self._end_ids, self._text, self._served,
                grammars, drawn_from,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        self._freed.give_back()
        if drawn_from:
            stem = next(r.logits for r in requests if r.logits)
            packet = await self._plane.put(unique_key(stem), {"logits": torch.cat(drawn_from)})
            completions = [replace(c, logits=packet) for c in completions]
        return GenerateOutput(seconds, tuple(completions))

    def _lookup(self, ref: PrefixRef) -> Tensor:
        return composed(self._model, [self._single(part) for part in ref.parts])

    def _served(self, ref: PrefixRef, kv: Tensor) -> tuple[str, ...]:
        return self._fingerprints.served(ref, kv, self._single)

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return self._documents.get(name)
        return self._cartridges.get(name, ref.version)
