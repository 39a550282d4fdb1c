"""Run the frozen model as the document teacher: it scores the tokens that the student sampled."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from monarch.actor import endpoint

from cartridge_forge.actors.base import ModelSource, RankPlace
from cartridge_forge.actors.model import ModelActor
from cartridge_forge.learning.batch import context_of
from cartridge_forge.learning.model.loading import claim_device
from cartridge_forge.learning.ranks import engine_errors, join
from cartridge_forge.learning.teacher import (
    contexts_of,
    host_spill,
    own_document_kv,
    score_kept,
)
from cartridge_forge.protocols.plugins import resolve
from cartridge_forge.protocols.spec.sections import WHOLE_VOCABULARY
from cartridge_forge.protocols.step import Sample, ScoreOutput, unique_key

ROWS_SHARE = 8  # responses under verification take at most this part of the documents' bytes


class DocTeacherActor(ModelActor):
    """Score the sampled tokens of a call in one pass, samples of one document over one prefix. A
    document's KV is computed once and reused (bounded LRU, then host memory). Verify the blocks of
    responses that the student proposes, over the same KV.

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
        student_top: int = 0,
    ) -> None:
        """Send `keep_top` entries a token, or all logits for None. With `keep_sampled` also send
        the sampled token's own log-probability, with `student_top` so many further entries, the
        student's likeliest among them; of a small vocabulary then all logits. A rank waits at most
        `silent_s` for another."""
        rank_place = RankPlace.here()
        device = claim_device(base.device, rank_place.rank)
        # A base that is divided is divided before it moves to the device.
        load_device = device if rank_place.world == 1 else "cpu"
        super().__init__(base, partial(base.load, load_device))
        self._ranks = join(
            rank_place.rank, rank_place.world, rank_place.rendezvous,
            device=device.type, timeout_s=silent_s,
            tensor=rank_place.world,
        )  # fmt: skip
        if rank_place.world > 1:
            resolve("hooks", "divide_base")(self._model, self._ranks)
        self._model.to(device)
        self._ranks.gather({})
        if self._ranks.leads:
            rank_place.left()
        self._row_tokens = row_tokens
        is_small = student_top > 0 and self._model.vocabulary <= WHOLE_VOCABULARY
        self._keep_top = None if is_small else keep_top
        # The least of a union's entries is no bound for a token outside it.
        self._keep_sampled = keep_sampled or student_top > 0
        self._student_top = student_top
        self._documents = base.document_cache(
            partial(own_document_kv, self._model),
            host_spill(self._model.device, base.host_kv_bytes),
        )
        self._rows: Any = None  # of responses under verification, once there are some
        self._row_bytes = base.max_kv_bytes // ROWS_SHARE

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample]) -> ScoreOutput:
        """Put the teacher's distributions over every response token under a key of this stem."""
        start, counts_before = time.perf_counter(), self._documents.counts
        with engine_errors(), self._ranks.abreast():
            prefixes = contexts_of(samples, self._documents)
            tensors = score_kept(
                self._model, samples, prefixes, self._row_tokens, self._keep_top,
                keep_sampled=self._keep_sampled, student_top=self._student_top, prefix=context_of,
            )  # fmt: skip
        seconds = time.perf_counter() - start
        self._freed.give_back()
        if not self._ranks.leads:
            return ScoreOutput(seconds)
        packet = await self._plane.put(unique_key(stem), tensors)
        looked_up = self._documents.counts.since(counts_before)
        return ScoreOutput(seconds, packet, len(next(iter(tensors.values()))), looked_up)

    @endpoint
    async def verify(self, call: Any) -> Any:
        """Return the reply (`VerifyReply`) to a `VerifyCall`: how many
        tokens of each block stay, and the teacher's token after them."""
        student = None
        if call.student is not None:
            student = (await self._plane.get(call.student))["logits"]
        if self._rows is None:
            self._rows = resolve("hooks", "verified_rows")(self._model, self._row_bytes)
        with engine_errors(), self._ranks.abreast():
            reply = self._rows.reply(call, self._documents.get, student)
        self._freed.give_back()
        return reply
