"""Training in company: the same forward as over the composition, and only one cartridge learns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from channel_setup import progress_of, trained

from learning.batch import pack, response_logits
from learning.cartridge import (
    CartridgeBank,
    composed,
    first_tokens,
    prefix_lengths,
    prefix_name,
    student_prefixes,
)
from learning.losses.objective import active_channels
from learning.step import StepOptions, train_step
from learning.teacher import TeacherDistribution, score
from protocols.spec.objective import ObjectiveSpec
from protocols.train_batch import TrainBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from protocols.types import Sample

    MakeSamples = Callable[..., list[Sample]]


def bank_of(twin: Twin) -> CartridgeBank:
    return first_tokens(twin.kv, tokens=8, frozen=1)


def in_company(make_samples: MakeSamples) -> list[Sample]:
    """About a alone, about a behind b, about c before a."""
    alone, behind, before = make_samples(("a", 4, 5), ("a", 3, 4), ("c", 5, 2))
    return [alone, replace(behind, composed=("b", "a")), replace(before, composed=("c", "a"))]


def test_the_student_reads_what_was_sampled_over(twin: Twin, make_samples: MakeSamples) -> None:
    samples, bank = in_company(make_samples), bank_of(twin)
    lengths = prefix_lengths(samples, dict.fromkeys("abc", 8))
    assert lengths == {"a": 8, "b": 8, "c": 8, "a\nb\na": 16, "c\nc\na": 16}
    packed = pack(samples, lengths, 40, prefix_name)
    logits = response_logits(twin.model, packed, student_prefixes(twin.model, bank, packed.names))
    begun = {name: kv[:, :, :, :8] for name, kv in twin.kv.items()}
    expected = [
        twin.response_logits(s, composed(twin.model, [begun[n] for n in s.composed or "a"]))
        for s in samples
    ]
    torch.testing.assert_close(logits, torch.cat(expected), rtol=0, atol=1e-4)


def test_only_the_document_s_own_cartridge_learns(llama: Twin, make_samples: MakeSamples) -> None:
    samples, bank = in_company(make_samples)[1:2], bank_of(llama)
    teacher = TeacherDistribution(logits=score(llama.model, samples, llama.cached(), 40))
    before = trained(bank)
    result = train_step(
        llama.model,
        bank,
        progress_of(bank, lr=0.1),
        TrainBatch(doc=samples, scores={"doc_teacher": teacher}),
        active_channels(ObjectiveSpec()),
        0,
        StepOptions(clip=1.0, row_tokens=40, staleness=0),
    )
    moved = (trained(bank) - before).flatten(1).abs().amax(1) > 0
    assert dict(zip(bank.names, moved.tolist(), strict=True)) == {"a": True, "b": False, "c": False}
    assert result.tokens == 4
    assert result.kl > 0


def test_the_teacher_has_the_document_alone(llama: Twin, make_samples: MakeSamples) -> None:
    samples = in_company(make_samples)
    alone = [replace(s, composed=()) for s in samples]
    scored = [score(llama.model, s, llama.cached(), 40) for s in (samples, alone)]
    assert torch.equal(*scored)


def test_prefixes_of_unequal_lengths_stay_apart(llama: Twin) -> None:
    bank = bank_of(llama)
    for kv, expected in zip(
        student_prefixes(llama.model, bank, ("a", "c")), bank.kv(["a", "c"]), strict=True
    ):
        assert torch.equal(kv, expected)
    one, two = student_prefixes(llama.model, bank, ("a", "a\nb\na"))
    assert (one.shape[3], two.shape[3]) == (8, 16)
    both = composed(llama.model, [llama.kv[n][:, :, :, :8] for n in "ba"])
    torch.testing.assert_close(one, llama.kv["a"][:, :, :, :8])
    torch.testing.assert_close(two, both)
