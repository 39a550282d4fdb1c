"""Logits and losses of packed samples over whole documents."""

from __future__ import annotations

from collections.abc import Sequence

from channel_setup import loss_form
from torch import Tensor
from twins import Twin

from cartridge_forge.learning.batch import PackedTokens, pack, response_logits
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import Sample

ZERO = 1e-5  # nats per token: float32 rounding


def packed_of(twin: Twin, samples: Sequence[Sample], row_tokens: int) -> PackedTokens:
    """Return the samples in rows of so many tokens."""
    return pack(samples, {name: len(ids) for name, ids in twin.documents.items()}, row_tokens)


def student(twin: Twin, packed: PackedTokens) -> Tensor:
    """Logits with every document's whole KV standing in as its cartridge."""
    cartridges = [document_kv(twin.model, twin.documents[name]) for name in packed.names]
    return response_logits(twin.model, packed, cartridges)


def per_token(logits: Tensor, teacher: TeacherDistribution, spec: LossSpec | None = None) -> float:
    """Return the loss of a response token."""
    total, count = doc_kl(logits, teacher, spec or loss_form())
    assert count == len(logits)
    return (total / count).item()
