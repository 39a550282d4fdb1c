"""What doc_kl tells of a step beside its loss: tokens behind a mistake, and the student's mass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from channel_setup import bank_of, loss_form, progress_of
from torch import Tensor
from twins import Twin

from cartridge_forge.learning.losses.channel import active_channels
from cartridge_forge.learning.losses.doc_kl import refused_before, student_mass
from cartridge_forge.learning.step import StepOptions, train_step
from cartridge_forge.learning.teacher import TeacherDistribution, top_k
from cartridge_forge.plugins.documents.study.verified import trained_marks
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.spec.sections import LossSpec
from cartridge_forge.protocols.step import Sample, TrainBatch

# Of five tokens; at each place the teacher's probabilities.
ROWS = (
    (0.60, 0.30, 0.06, 0.03, 0.01),
    (0.90, 0.04, 0.03, 0.02, 0.01),
    (0.25, 0.25, 0.25, 0.21, 0.04),
    (0.96, 0.01, 0.01, 0.01, 0.01),
)


def whole(*rows: tuple[float, ...]) -> TeacherDistribution:
    return TeacherDistribution(logits=torch.tensor(rows).log() + 3.0)


def of_top(k: int, *rows: tuple[float, ...]) -> TeacherDistribution:
    return TeacherDistribution(None, *top_k(torch.tensor(rows).log(), k))


def behind(teacher: TeacherDistribution, targets: list[int], *texts: tuple[int, bool]) -> int:
    return refused_before(texts, teacher, torch.tensor(targets))


@pytest.mark.parametrize("teacher", [whole(*ROWS), of_top(5, *ROWS), of_top(4, *ROWS)])
def test_tokens_behind_the_first_mistake_by_hand(teacher: TeacherDistribution) -> None:
    """The probabilities of 2, 1, 0, 0 are 0.06, 0.04, 0.25, 0.96: the second is the mistake."""
    assert behind(teacher, [2, 1, 0, 0], (4, True)) == 2
    # Two texts of two tokens: the mistake is the last of its own text.
    assert behind(teacher, [2, 1, 0, 0], (2, True), (2, True)) == 0
    # The same mistake in a text that was verified, or that the teacher wrote.
    assert behind(teacher, [2, 1, 0, 0], (4, False)) == 0
    # 4 has 0.01 and 4 has 0.04: both texts begin with a mistake.
    assert behind(teacher, [4, 0, 4, 0], (2, True), (2, True)) == 2
    assert behind(teacher, [0, 0, 0, 0], (4, True)) == 0
    assert behind(teacher, [4, 4, 4, 4], (1, False), (3, True)) == 2


def test_a_token_outside_a_small_top_k_is_refused_where_that_is_certain() -> None:
    """Of the third place the top entry has 0.25: another one may have as much, and is not counted.
    Of the fourth it leaves 0.04."""
    assert behind(of_top(1, *ROWS[2:]), [4, 0], (2, True)) == 0
    assert behind(of_top(1, *ROWS[3:], ROWS[2]), [4, 0], (2, True)) == 1
    # Where the scores have the token's own probability, that decides.
    told = of_top(1, *ROWS[2:])
    known = TeacherDistribution(None, told.indices, told.logprobs, torch.tensor([0.04, 0.96]).log())
    assert behind(known, [4, 0], (2, True)) == 1


def test_the_students_mass_on_the_teachers_entries_by_hand() -> None:
    """The teacher's two likeliest are 0 and 1, of which the student has 0.2 + 0.5 and 0.1 + 0.1."""
    student = torch.tensor([[0.2, 0.5, 0.1, 0.1, 0.1], [0.1, 0.1, 0.1, 0.1, 0.6]]).log() - 4.0
    teacher = of_top(2, ROWS[0], (0.5, 0.3, 0.1, 0.06, 0.04))
    assert student_mass(student, teacher).tolist() == pytest.approx([0.7, 0.2], abs=1e-6)


def facts(
    llama: Twin, samples: list[Sample], teacher: TeacherDistribution, direction: str,
    micro_tokens: int | None = None,
) -> dict[str, float]:  # fmt: skip
    """The facts of doc_kl in a step of real models; each micro-batch reads its own logits."""
    bank = bank_of(llama)
    output = train_step(
        llama.model, bank, progress_of(bank),
        TrainBatch(doc=samples, scores={"doc_teacher": teacher}),
        active_channels(EpisodesObjective(), loss_form(direction)), 0,
        StepOptions(
            clip=1.0, row_tokens=20, staleness=0, micro_tokens=micro_tokens,
            logit_bytes=None if micro_tokens is None else 1000,
        ),
    )  # fmt: skip
    return dict(output.terms["doc_kl"])


@pytest.mark.parametrize("micro_tokens", [None, 8])
def test_a_step_tells_both_whatever_its_parts(
    llama: Twin, make_samples: object, micro_tokens: int | None
) -> None:
    """Against the student's own logits over its cartridge, and a teacher made by hand: the third of
    five tokens of the first sample is a mistake, and the first of three of the second."""
    assert callable(make_samples)
    samples: list[Sample] = make_samples(("a", 4, 5), ("b", 2, 3))
    targets = [t for s in samples for t in s.response_ids]
    logits = torch.zeros(8, llama.model.vocabulary)
    logits[range(8), targets] = 9.0
    logits[[2, 5], [targets[2], targets[5]]] = -9.0
    teacher = TeacherDistribution(None, *top_k(logits, 4))
    told = facts(llama, samples, teacher, "reverse", micro_tokens)
    assert told["after_refusal"] == (2 + 2) / 8
    bank = bank_of(llama)
    masses = []
    for sample, rows in zip(samples, (slice(0, 5), slice(5, 8)), strict=True):
        kv: Tensor = bank.kv([sample.cartridge])[0].detach()
        own = llama.response_logits(sample, kv).double().softmax(-1)
        assert teacher.indices is not None
        masses += own.gather(-1, teacher.indices[rows].long()).sum(-1).tolist()
    assert told["student_mass"] == pytest.approx(sum(masses) / 8, rel=1e-4)
    # A divergence that weighs by the teacher does not need the student's mass.
    assert "student_mass" not in facts(llama, samples, teacher, "forward")
    whole_vocabulary = TeacherDistribution(logits=logits)
    told = facts(llama, samples, whole_vocabulary, "jsd")
    assert told["after_refusal"] == 0.5
    assert "student_mass" not in told


def test_jsd_trains_verified_rows_token_by_token(llama: Twin, make_samples: object) -> None:
    """JSD 0.5 of a verified sample, the teacher's token among them, and of one whose tokens behind
    a refused one are masked: against transformers and float64, over the tokens that bear a loss. By
    hand, of probabilities (0.5, 0.5) and (0.9, 0.1) it is 0.101749 (test_doc_kl.py)."""
    assert callable(make_samples)
    verified, masked = make_samples(("a", 4, 5), ("b", 2, 3))
    samples = [
        replace(verified, verified=True, taught=(1,)), replace(masked, masked=(2,))
    ]  # fmt: skip
    random = torch.Generator().manual_seed(2)
    scored = 3.0 * torch.randn(8, llama.model.vocabulary, generator=random)
    marks = trained_marks(samples)
    assert marks == ((True,) * 5, (True, True, False))
    bank = bank_of(llama)
    expected = []
    for sample, rows in zip(samples, (slice(0, 5), slice(5, 7)), strict=True):
        own = llama.response_logits(sample, bank.kv([sample.cartridge])[0].detach())
        s, t = (x.double().softmax(-1) for x in (own[: rows.stop - rows.start], scored[rows]))
        m = (s + t) / 2
        expected += (0.5 * ((t * (t / m).log()).sum(-1) + (s * (s / m).log()).sum(-1))).tolist()
    output = train_step(
        llama.model, bank, progress_of(bank),
        TrainBatch(
            doc=samples, doc_trained=marks,
            scores={"doc_teacher": TeacherDistribution(logits=scored[:7])},
        ),
        active_channels(EpisodesObjective(), LossSpec(direction="jsd", beta=0.5)), 0,
        StepOptions(clip=1.0, row_tokens=20, staleness=0),
    )  # fmt: skip
    assert output.tokens == 7
    assert output.kl == pytest.approx(sum(expected) / 7, rel=1e-5)
    # A verified sample has no token behind a mistake; the other's first token is one.
    assert output.terms["doc_kl"]["after_refusal"] == 1 / 7
