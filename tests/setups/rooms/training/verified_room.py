"""Verified rollouts with real models in this process, without a mesh."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.plugins.decoding.verified.records import VerifyCall, VerifyReply
from cartridge_forge.plugins.decoding.verified.rows import VerifiedRows
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import (
    Completion,
    GenerateRequest,
    PrefixRef,
    TensorLayout,
    TensorRef,
)


class Room:
    """One generator and one teacher over a model in this process, with the calls of a mesh. Both
    read `prefixes`; every context is `document`. `losses` are the calls to the teacher, by number,
    before which the plane loses its tensors."""

    plane_life = 0

    def __init__(
        self,
        model: LanguageModel,
        prefixes: dict[PrefixRef, Tensor],
        document: PrefixRef,
        end_ids: frozenset[int],
        losses: Sequence[int] = (),
    ) -> None:
        self.model, self.prefixes, self.document = model, prefixes, document
        self.end_ids, self.losses = end_ids, losses
        self.rows = VerifiedRows(model, 2**26)
        self.plane, self.stored = self, dict[str, Tensor]()
        self.pools = {"generator": self, "doc_teacher": self}
        self.numbers = itertools.count()
        self.calls: list[VerifyCall] = []
        self.groups = 1

    async def split(
        self, items: Sequence[Any], work: Callable[[Sequence[Any]], Awaitable[list[Any]]],
        most: int | None = None,
    ) -> list[Any]:  # fmt: skip
        parts = [await work(items[i :: self.groups]) for i in range(self.groups)]
        return [parts[i % self.groups][i // self.groups] for i in range(len(items))]

    async def generate(
        self, requests: Sequence[GenerateRequest], replied: object = None, *, whole: bool = False
    ) -> list[Completion]:
        drawn_from: list[Tensor] = []
        found = generate(
            self.model, requests, self.prefixes.__getitem__, self.end_ids, drawn_from=drawn_from
        )
        if not drawn_from:
            return found
        key = f"{requests[0].logits}/{next(self.numbers)}"
        self.stored[key] = torch.cat(drawn_from)
        ref = TensorRef(key, TensorLayout(()))
        return [Completion(**{**vars(c), "logits": ref}) for c in found]

    async def route(self, method: str, packed: Any, *, session: str) -> VerifyReply:
        call: VerifyCall = packed.value
        assert (method, session) == ("verify", call.group)
        if len(self.calls) in self.losses:
            self.stored.clear()
            self.calls.append(call)
            self.rows = VerifiedRows(self.model, 2**26)
            raise PlaneError("the tensors are lost")
        self.calls.append(call)
        student = None if call.student is None else self.stored[call.student.key]
        found, repeated = self.rows.verify(call, lambda name: self.prefixes[self.document], student)
        return VerifyReply(0.0, tuple((v.accepted, v.token) for v in found), 2.0, repeated)

    async def delete(self, key: str) -> None:
        del self.stored[key]

    async def replaced(self, life: int, error: PlaneError) -> None:
        return
