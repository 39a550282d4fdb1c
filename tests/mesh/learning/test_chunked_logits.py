"""Logits in chunks: the same losses and gradients, and never all of the logits at once; and what a
backward pass through a frozen base costs."""

from __future__ import annotations

import pytest
import torch
from channel_setup import ALL, bank_of, changed, do, scene, scored
from twins import Twin

from cartridge_forge.learning.batch import LOGIT_BYTES
from cartridge_forge.learning.teacher import TeacherDistribution, top_k
from cartridge_forge.plugins.episodes.spec.objective import SdpoSpec
from cartridge_forge.plugins.episodes.spec.policy_gradient import GrpoSpec
from cartridge_forge.protocols.spec.sections import LossSpec

VOCAB = 97

TOKEN = VOCAB * LOGIT_BYTES  # bytes of one token's logits


def top_5(teacher: TeacherDistribution) -> TeacherDistribution:
    assert teacher.logits is not None
    return TeacherDistribution(None, *top_k(teacher.logits, 5))


OBJECTIVES = {
    "all channels": (ALL, LossSpec()),
    "reverse, with a reference": (
        changed(ALL, grpo=GrpoSpec(kl=0.1)),
        LossSpec(direction="reverse"),
    ),
    "renormalised": (ALL, LossSpec(direction="jsd", beta=0.3, form="renormalised")),
    "pairs": (ALL, LossSpec(direction="cross_entropy", form="pairs")),
    "sampled hints": (changed(ALL, sdpo=SdpoSpec(variant="sampled")), LossSpec()),
}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("kept", [None, 5])
def test_chunks_change_no_term_and_no_gradient(llama: Twin, name: str, kept: int | None) -> None:
    objective, loss = OBJECTIVES[name]
    batch = scene(llama, bank_of(llama))
    if kept:
        batch = scored(batch, doc_teacher=top_5(batch.scores["doc_teacher"]))
        if objective.sdpo.variant == "jsd":
            batch = scored(batch, sdpo_teacher=top_5(batch.scores["sdpo_teacher"]))
    whole = do(llama, batch, objective, loss, compare_gradients=True)
    assert whole.gradient is not None
    for tokens in (1, 7):
        chunked = do(
            llama, batch, objective, loss, compare_gradients=True, logit_bytes=tokens * TOKEN
        )
        for channel, term in whole.result.terms.items():
            assert chunked.result.terms[channel] == pytest.approx(term, rel=1e-5, abs=1e-6)
        assert chunked.result.cosines == pytest.approx(whole.result.cosines, abs=1e-4)
        assert chunked.gradient is not None
        scale = whole.gradient.abs().max().item()
        torch.testing.assert_close(chunked.gradient, whole.gradient, rtol=0, atol=1e-5 * scale)
