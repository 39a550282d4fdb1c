"""sdpo: values worked out on paper, what clamping reports, the sampled variant's expectation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from channel_setup import loss_form
from pydantic import ValidationError
from torch import Tensor

from learning.losses.channel import LossTerm
from learning.losses.doc_kl import doc_kl
from learning.losses.sdpo import alpha_at, sdpo_term, sdpo_tokens
from learning.scoring import TeacherDistribution, top_k
from protocols.errors import SpecError
from protocols.spec.objective import SdpoSpec

S, T = (0.5, 0.5), (0.9, 0.1)


def logits(*rows: tuple[float, ...]) -> Tensor:
    """Logits of the given distributions, each shifted by its own constant."""
    return torch.tensor(rows).log() + torch.arange(1.0, len(rows) + 1)[:, None]


def sdpo(
    student: Tensor, teacher: TeacherDistribution, targets: Tensor, old: Tensor, spec: SdpoSpec
) -> LossTerm:
    return sdpo_term(sdpo_tokens(student, teacher, targets, old, spec), spec)


def term_of(
    spec: SdpoSpec, student: Tensor | None = None, teacher: Tensor | None = None
) -> LossTerm:
    student = logits(S) if student is None else student
    given = TeacherDistribution(logits=logits(T) if teacher is None else teacher)
    targets = torch.zeros(len(student), dtype=torch.long)
    return sdpo(student, given, targets, torch.zeros(len(student)), spec)


@pytest.mark.parametrize(
    ("spec", "expected", "clipped", "negative"),
    [
        (SdpoSpec(beta=0.0, token_clip=None), 0.368064, 0.0, 0),
        (SdpoSpec(beta=1.0, token_clip=None), 0.510826, 0.0, 0),
        (SdpoSpec(beta=0.5, token_clip=None), 0.101749, 0.0, 0),
        (SdpoSpec(beta=0.0, token_clip=None, temperature=2.0), 0.130812, 0.0, 0),
        # At one half the outcomes contribute .028973 and .072776, of which the second is clamped.
        (SdpoSpec(beta=0.5, token_clip=0.05), 0.078973, 0.5, 0),
        # .9 ln 1.8 = .529 is clamped to .05, .1 ln .2 = -.160944 is not: below zero.
        (SdpoSpec(beta=0.0, token_clip=0.05), -0.110944, 0.5, 1),
        (SdpoSpec(beta=0.0, token_clip=10.0), 0.368064, 0.0, 0),  # so wide that it never binds
    ],
)
def test_two_outcomes(spec: SdpoSpec, expected: float, clipped: float, negative: int) -> None:
    term = term_of(spec)
    assert (term.count, term.items) == (1, 1)
    assert term.total.item() == pytest.approx(expected, abs=6e-7)
    assert term.facts["clipped"].item() == clipped
    assert term.facts["negative"].item() == negative


def test_j_over_beta_tends_to_the_forward_kl() -> None:
    """The special case at 0 is the limit of J / beta, not of J itself, which tends to 0."""
    student, teacher = torch.tensor([S]).log(), torch.tensor([T]).log()
    found = term_of(SdpoSpec(beta=1e-3, token_clip=None), student, teacher).total.item() / 1e-3
    assert found == pytest.approx(0.368064 - 0.64e-3 / 2, abs=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_unclamped_it_is_the_jsd_of_doc_kl(beta: float) -> None:
    draws = torch.Generator().manual_seed(3)
    student = torch.randn(6, 11, generator=draws).requires_grad_()
    teacher = TeacherDistribution(logits=torch.randn(6, 11, generator=draws))
    assert teacher.logits is not None
    for given in (teacher, TeacherDistribution(None, *top_k(teacher.logits, 4))):
        spec = SdpoSpec(beta=beta, token_clip=None)
        term = sdpo(student, given, torch.zeros(6).long(), torch.zeros(6), spec)
        reference, count = doc_kl(student, given, loss_form("jsd", beta=beta))
        assert term.count == count == 6
        assert term.total.item() == pytest.approx(reference.item(), rel=1e-5)
        ours, theirs = (torch.autograd.grad(x, student)[0] for x in (term.total, reference))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_clamped_outcome_gives_no_gradient() -> None:
    """b = 0: d(-.1 log S_1)/dz alone is left, .1 * (S - e_1) = (.05, -.05)."""
    student = logits(S).requires_grad_()
    (gradient,) = torch.autograd.grad(term_of(SdpoSpec(beta=0.0), student).total, student)
    assert gradient[0].tolist() == pytest.approx([0.05, -0.05], abs=1e-6)


def test_the_sampled_variant_by_hand() -> None:
    """(ln .5 - ln .9) * ln .5 = .407423; its gradient (ln .5 - ln .9) * (e_0 - S)."""
    student = logits(S).requires_grad_()
    old = torch.tensor([0.5]).log()
    zero = torch.tensor([0])
    term = sdpo(
        student, TeacherDistribution(logits=logits(T)), zero, old, SdpoSpec(variant="sampled")
    )
    assert term.total.item() == pytest.approx(0.407423, abs=1e-6)
    (gradient,) = torch.autograd.grad(term.total, student)
    assert gradient[0].tolist() == pytest.approx([-0.293893, 0.293893], abs=1e-6)
    assert term.facts["ratio"].item() == 1.0


@pytest.mark.parametrize(("old", "ratio"), [(0.4, 1.25), (0.1, 2.0), (1e-30, 2.0), (1.0, 0.5)])
def test_the_sampled_variant_weighs_an_older_sample(old: float, ratio: float) -> None:
    at = torch.tensor([old]).log()
    zero = torch.tensor([0])
    term = sdpo(
        logits(S), TeacherDistribution(logits=logits(T)), zero, at, SdpoSpec(variant="sampled")
    )
    assert term.facts["ratio"].item() == pytest.approx(ratio, abs=1e-5)
    assert term.total.item() == pytest.approx(ratio * 0.407423, abs=1e-5)


def test_the_sampled_gradient_is_the_reverse_kl_s_on_average() -> None:
    """Weighed with S over every token of the vocabulary, exactly."""
    draws = torch.Generator().manual_seed(5)
    student = torch.randn(1, 7, generator=draws).requires_grad_()
    teacher = TeacherDistribution(logits=torch.randn(1, 7, generator=draws))
    probs = student.detach().softmax(-1)[0]
    mean = torch.zeros(1, 7)
    for token in range(7):
        old = probs[token].log()[None]
        term = sdpo(student, teacher, torch.tensor([token]), old, SdpoSpec(variant="sampled"))
        mean += probs[token] * torch.autograd.grad(term.total, student)[0]
    reverse, _ = doc_kl(student, teacher, loss_form("reverse"))
    torch.testing.assert_close(mean, torch.autograd.grad(reverse, student)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "spec", [SdpoSpec(), SdpoSpec(beta=0.0), SdpoSpec(beta=1.0), SdpoSpec(variant="sampled")]
)
def test_no_turn_gives_zero_and_no_gradient(spec: SdpoSpec) -> None:
    student = torch.empty(0, 9, requires_grad=True)
    term = term_of(spec, student, torch.empty(0, 9))
    assert (term.total.item(), term.count) == (0.0, 0)
    term.total.backward()
    assert student.grad is not None


@pytest.mark.parametrize("spec", [SdpoSpec(), SdpoSpec(variant="sampled")])
def test_other_tokens_do_not_matter(spec: SdpoSpec) -> None:
    """Tokens add up: each alone gives its share."""
    draws = torch.Generator().manual_seed(6)
    student, teacher = torch.randn(5, 9, generator=draws), torch.randn(5, 9, generator=draws)
    whole = term_of(spec, student, teacher)
    alone = [term_of(spec, student[n : n + 1], teacher[n : n + 1]) for n in range(5)]
    assert whole.total.item() == pytest.approx(sum(t.total.item() for t in alone), rel=1e-5)
    assert whole.count == 5


def test_alpha_warms_up_from_zero_and_stays() -> None:
    assert [alpha_at(step, 0.1, 4) for step in range(6)] == pytest.approx(
        [0.0, 0.025, 0.05, 0.075, 0.1, 0.1]
    )
    assert alpha_at(0, 0.1, 0) == 0.1


def test_the_sampled_variant_needs_the_sampled_token_s_probability() -> None:
    teacher = TeacherDistribution(None, *top_k(logits(T), 1))
    with pytest.raises(SpecError, match=r"needs the teacher's whole distribution.*top_k: full"):
        sdpo(logits(S), teacher, torch.tensor([1]), torch.zeros(1), SdpoSpec(variant="sampled"))


@pytest.mark.parametrize(
    "wrong",
    [
        {"variant": "kl"},
        {"beta": 1.5},
        {"temperature": 0.0},
        {"token_clip": 0.0},
        {"variant": "sampled", "temperature": 2.0},
    ],
)
def test_what_cannot_be_computed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(wrong)[-1]):
        SdpoSpec(**wrong)
