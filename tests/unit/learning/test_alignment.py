"""The alignment test: with the whole document's KV as a frozen cartridge, student and teacher are
the same function of the same tokens, so doc_kl is zero for whatever is scored and however it is
packed. Any shift between the two sides breaks it, and the tests here show that too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import progress_of
from rooms.learning.alignment_setup import ZERO, packed_of, per_token, student

from cartridge_forge.learning.batch import PackedTokens
from cartridge_forge.learning.cartridge import CartridgeBank
from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import (
    DocumentKVCache,
    TeacherDistribution,
    document_kv,
    score,
)
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


@pytest.mark.parametrize("length", range(1, 13))
def test_doc_kl_is_zero_at_every_response_length(
    twin: Twin, make_samples: MakeSamples, length: int
) -> None:
    samples = make_samples(("a", 5, length), ("c", 3, 12), ("a", 2, 1))
    teacher = TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 17))
    assert abs(per_token(student(twin, packed_of(twin, samples, 40)), teacher)) < ZERO


def test_a_training_step_on_the_whole_document_has_nothing_to_learn(
    llama: Twin, make_samples: MakeSamples
) -> None:
    """Through train_step itself, with cartridges of 24 and 31 tokens."""
    documents = {name: llama.documents[name] for name in "ac"}
    cache = DocumentKVCache(lambda ids: document_kv(llama.model, ids), documents, 1 << 30)
    bank = CartridgeBank("ac", [cache.get(name) for name in "ac"], frozen=23)
    samples = make_samples(("c", 4, 7), ("a", 2, 1), ("a", 6, 9))
    teacher = TeacherDistribution(logits=score(llama.model, samples, cache, 15))
    result = train_step(
        llama.model,
        bank,
        progress_of(bank, lr=0.0),
        TrainBatch(doc=samples, scores={"doc_teacher": teacher}),
        active_channels(EpisodesObjective()),
        0,
        StepOptions(clip=1.0, row_tokens=32, staleness=0),
    )
    assert abs(result.kl) < ZERO
    assert result.grad_norm < 1e-4
    assert result.tokens == 17


def test_the_teacher_is_the_model_reading_document_prompt_and_response(
    twin: Twin, make_samples: MakeSamples
) -> None:
    """One plain pass of transformers over the whole text: were both our sides wrong alike, doc_kl
    would be zero all the same."""
    samples = make_samples(("c", 4, 5), ("a", 2, 1), ("b", 6, 9), ("a", 3, 3))
    scored = score(twin.model, samples, twin.cached(), row_tokens=16)
    expected = []
    for s in samples:
        text = twin.documents[s.cartridge] + s.prompt_ids + s.response_ids
        expected.append(twin.logits(text)[-len(s.response_ids) - 1 : -1])
    torch.testing.assert_close(scored, torch.cat(expected), rtol=0, atol=5e-5)


def shifted_teacher(
    twin: Twin, samples: list[Sample], packed: PackedTokens
) -> tuple[Tensor, Tensor]:
    return student(twin, packed), score(twin.model, samples, twin.cached(), 40).roll(1, dims=0)


def late_places(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    late = replace(packed, predicts=(packed.predicts + 1).clamp(max=len(packed.ids) - 1))
    return student(twin, late), score(twin.model, samples, twin.cached(), 40)


def late_positions(
    twin: Twin, samples: list[Sample], packed: PackedTokens
) -> tuple[Tensor, Tensor]:
    late = replace(packed, positions=packed.positions + 1)
    return student(twin, late), score(twin.model, samples, twin.cached(), 40)


def other_order(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    return student(twin, packed), score(twin.model, samples[::-1], twin.cached(), 40)


def second_start(twin: Twin, samples: list[Sample], packed: PackedTokens) -> tuple[Tensor, Tensor]:
    """A beginning-of-sequence token in the middle of the teacher's context."""
    started = [replace(s, prompt_ids=(1, *s.prompt_ids)) for s in samples]
    return student(twin, packed), score(twin.model, started, twin.cached(), 40)


@pytest.mark.parametrize(
    "mistake", [shifted_teacher, late_places, late_positions, other_order, second_start]
)
def test_a_misalignment_shows(
    twin: Twin,
    make_samples: MakeSamples,
    mistake: Callable[[Twin, list[Sample], PackedTokens], tuple[Tensor, Tensor]],
) -> None:
    samples = make_samples(("a", 5, 4), ("c", 3, 6), ("a", 2, 1))
    logits, scored = mistake(twin, samples, packed_of(twin, samples, 20))
    assert per_token(logits, TeacherDistribution(logits=scored)) > 0.01
