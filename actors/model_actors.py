"""Run the frozen model: the generator of whole batches, and the teachers that score given tokens.

`actors.engine_generator` serves requests that arrive and end at any time; `actors.trainer` trains.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import ClassVar

import torch
from monarch.actor import Actor, endpoint
from torch import Tensor

from cartridge_forge.actors.base import FreedMemory, ModelSource, RankPlace
from cartridge_forge.learning.batch import context_of
from cartridge_forge.learning.cartridge import (
    CartridgeVersions,
    Fingerprints,
    composed,
    get_missing,
    since_of,
)
from cartridge_forge.learning.decode import GrammarCompiler, generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import (
    claim_device,
    flush_denormals,
    text_of,
    tokenizer_of,
)
from cartridge_forge.learning.model.parallel import divide_base
from cartridge_forge.learning.ranks import join
from cartridge_forge.learning.teacher import (
    contexts_of,
    document_kv,
    host_spill,
    own_document_kv,
    score_kept,
)
from cartridge_forge.protocols.errors import EngineDied, ForgeError
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.ports import TensorPlane
from cartridge_forge.protocols.types import (
    CartridgeSnapshot,
    GenerateOutput,
    GenerateRequest,
    PrefixRef,
    PublishedCartridge,
    Sample,
    ScoreOutput,
    TensorRef,
)

log = logging.getLogger("forge.engine")


@contextmanager
def engine_errors() -> Iterator[None]:
    """Raise an error of the model's passes in this block as EngineDied, so that the pool replaces
    the process and repeats the call: after it, as when memory ran out, the model cannot be trusted.
    A ForgeError is raised unchanged."""
    try:
        yield
    except ForgeError:
        raise
    except Exception as error:
        log.exception("the model's pass failed")
        raise EngineDied.of(error) from error


class ModelActor(Actor):
    """Hold the model and the tensor plane of its process."""

    def __init__(self, base: ModelSource, load: Callable[[], LanguageModel] | None = None) -> None:
        """Load the model by `load`, or from `base`, after the number of threads is set."""
        torch.set_num_threads(base.threads)
        flush_denormals()
        self._model = (load or base.load)()
        self._plane = base.plane
        self._freed = FreedMemory()

    @endpoint
    async def ready(self) -> int:
        """Return this process's id, once the model is loaded."""
        return os.getpid()

    @endpoint
    async def use_plane(self, plane: TensorPlane) -> None:
        """Pass tensors over this plane from now on: the previous one was lost."""
        self._plane = plane

    async def _put(self, stem: str, tensors: Mapping[str, Tensor]) -> TensorRef:
        """Put tensors under a unique key, even when a call is repeated after its replica died. Keys
        affect no result, so their suffix need not come from a seeded generator."""
        return await self._plane.put(f"{stem}/{uuid.uuid4().hex[:12]}", tensors)


class CartridgeReaderActor(ModelActor):
    """Hold the last few published cartridge versions beside the model."""

    def __init__(self, base: ModelSource, keep_versions: int) -> None:
        super().__init__(base)
        self._cartridges = CartridgeVersions(keep_versions)
        self._fingerprints = Fingerprints()

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        """Load what is not held of a published version from the tensor plane; requests may name the
        version from now on."""
        new = await self._missing(self._cartridges, snapshot.cartridges)
        self._cartridges.add(snapshot.version, since_of(snapshot.cartridges), new)
        return snapshot.version

    async def _missing(
        self, held: CartridgeVersions, cartridges: Sequence[PublishedCartridge]
    ) -> dict[str, Tensor]:
        """Return the tensors that are not held, on the model's device."""
        new = await get_missing(self._plane.get, cartridges, held.missing(since_of(cartridges)))
        return {n: kv.to(self._model.device, self._model.dtype) for n, kv in new.items()}


class GeneratorActor(CartridgeReaderActor):
    """Run one replica of the `Generate` port. Holds the last few published versions.

    Prefix names: "cartridge/<document>" for a published version, "document/<document>" for a
    document's own KV. A request may name an ordered composition of them.
    """

    # What shows the numbers that it decoded over (`services.roles.generator_evidence`).
    evidence: ClassVar[frozenset[str]] = frozenset({"fingerprint", "logprobs"})

    def __init__(self, base: ModelSource, end_ids: frozenset[int], keep_versions: int) -> None:
        super().__init__(base, keep_versions)
        self._model.pack()
        self._end_ids = end_ids
        self._text = text_of(base.path)
        read = partial(tokenizer_of, base.path)
        self._grammars: Callable[[], GrammarCompiler] = cache(
            lambda: resolve("hooks", "grammars")(read, end_ids)
        )
        self._documents = base.document_cache(partial(document_kv, self._model))

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        begun = time.perf_counter()
        grammars = self._grammars() if any(r.grammar is not None for r in requests) else None
        with engine_errors():
            done = generate(
                self._model, requests, self._lookup, self._end_ids, self._text, self._served,
                grammars,
            )  # fmt: skip
        seconds = time.perf_counter() - begun
        self._freed.give_back()
        return GenerateOutput(seconds, tuple(done))

    def _lookup(self, ref: PrefixRef) -> Tensor:
        return composed(self._model, [self._single(part) for part in ref.parts])

    def _served(self, ref: PrefixRef, kv: Tensor) -> tuple[str, ...]:
        return self._fingerprints.served(ref, kv, self._single)

    def _single(self, ref: PrefixRef) -> Tensor:
        kind, _, name = ref.name.partition("/")
        if kind == "document":
            return self._documents.get(name)
        return self._cartridges.get(name, ref.version)


class DocTeacherActor(ModelActor):
    """Score the sampled tokens of a call in one pass, samples of one document over one prefix. A
    document's KV is computed once and reused (bounded LRU, then host memory).

    Several ranks divide the base and each document's KV. All get the same calls and compute the
    same scores; rank 0 puts them into the plane, and the replies of the others are ignored.
    """

    def __init__(
        self,
        base: ModelSource,
        row_tokens: int,
        keep_top: int | None,
        keep_sampled: bool = False,
        silent_s: float = 60.0,
    ) -> None:
        """Send `keep_top` entries a token, or all logits for None. With `keep_sampled` also send
        the sampled token's own log-probability. A rank waits at most `silent_s` for another."""
        place = RankPlace.here()
        device = claim_device(base.device, place.rank)
        whole = device if place.world == 1 else "cpu"  # divided before it moves to the device
        super().__init__(base, partial(base.load, whole))
        self._ranks = join(
            place.rank, place.world, place.rendezvous, device=device.type, timeout_s=silent_s,
            tensor=place.world,
        )  # fmt: skip
        divide_base(self._model, self._ranks)
        self._model.to(device)
        self._ranks.gather({})
        if self._ranks.leads:
            place.left()
        self._row_tokens = row_tokens
        self._keep_top, self._keep_sampled = keep_top, keep_sampled
        self._documents = base.document_cache(
            partial(own_document_kv, self._model),
            host_spill(self._model.device, base.host_kv_bytes),
        )

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample]) -> ScoreOutput:
        """Put the teacher's distributions over every response token under a key of this stem."""
        begun, before = time.perf_counter(), self._documents.counts
        with engine_errors(), self._ranks.abreast():
            prefixes = contexts_of(samples, self._documents)
            tensors = score_kept(
                self._model, samples, prefixes, self._row_tokens, self._keep_top,
                keep_sampled=self._keep_sampled, prefix=context_of,
            )  # fmt: skip
        seconds = time.perf_counter() - begun
        self._freed.give_back()
        if not self._ranks.leads:
            return ScoreOutput(seconds)
        packet = await self._put(stem, tensors)
        looked_up = self._documents.counts.since(before)
        return ScoreOutput(seconds, packet, len(next(iter(tensors.values()))), looked_up)
