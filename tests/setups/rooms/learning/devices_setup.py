"""A twin elsewhere, and trainers of both to compare."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from channel_setup import ALL, changed, loss_form
from second_device import elsewhere
from torch import Tensor
from twins import Twin

from cartridge_forge.learning.batch import PackedTokens, pack, response_logits
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.spec.sections import LossSpec, TrainSpec
from cartridge_forge.protocols.step import Sample, TrainStepOutput

TRAIN = TrainSpec(steps=5, lr=0.02, row_tokens=24)
OBJECTIVE = changed(ALL, micro_tokens=40, compare_every=3)


@pytest.fixture
def there(llama: Twin) -> Iterator[Twin]:
    """The same twin with its model, and what it has read, elsewhere."""
    with elsewhere():
        model = copy.deepcopy(llama.model).to("elsewhere")
        yield replace(llama, model=model, kv={n: kv.to("elsewhere") for n, kv in llama.kv.items()})


def trainer_of(
    twin: Twin,
    train: TrainSpec = TRAIN,
    objective: EpisodesObjective = OBJECTIVE,
    last_state: Path | None = None,
) -> CartridgeTrainer:
    """Return a trainer of two cartridges, where the twin's model is."""
    bank = first_tokens({n: twin.kv[n] for n in "ab"}, 8, 1)
    return CartridgeTrainer(
        twin.model, bank, train, last_state, objective=objective, publish_dtype="bfloat16"
    )


def same(one: TrainStepOutput, other: TrainStepOutput) -> None:
    """Assert two steps equal but for rounding."""
    assert one.tokens == other.tokens
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert one.terms.keys() == other.terms.keys()
    for name, term in one.terms.items():
        assert term == pytest.approx(dict(other.terms[name]), rel=1e-3, abs=1e-5)
    assert one.cosines == pytest.approx(dict(other.cosines), abs=1e-4)


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
