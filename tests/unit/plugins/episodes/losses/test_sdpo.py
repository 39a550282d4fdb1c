"""sdpo: values worked out on paper, what a bound takes away, the sampled variant's expectation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from channel_setup import loss_form
from pydantic import ValidationError
from torch import Tensor

from cartridge_forge.learning.losses.channel import LossAccumulator, LossTerm
from cartridge_forge.learning.losses.doc_kl import doc_kl
from cartridge_forge.learning.teacher import TeacherDistribution, top_k
from cartridge_forge.plugins.episodes.losses.sdpo import alpha_at, sdpo_term, sdpo_tokens
from cartridge_forge.plugins.episodes.spec.objective import SdpoSpec
from cartridge_forge.protocols.errors import SpecError

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
    ("spec", "expected"),
    [
        (SdpoSpec(beta=0.0), 0.368064),
        (SdpoSpec(beta=1.0), 0.510826),
        (SdpoSpec(), 0.101749),
        (SdpoSpec(beta=0.0, temperature=2.0), 0.130812),
        # At one half the outcomes contribute .028973 and .072776, of which the second is clamped.
        (SdpoSpec(token_clip=0.05), 0.078973),
        # .9 ln 1.8 = .529 is clamped to .05, .1 ln .2 = -.160944 is not: below zero.
        (SdpoSpec(beta=0.0, token_clip=0.05), -0.110944),
        (SdpoSpec(beta=0.0, token_clip=10.0), 0.368064),  # so wide that it never binds
        (SdpoSpec(token_bound=0.05), 0.05),
        (SdpoSpec(token_bound=0.2), 0.101749),
    ],
)
def test_two_outcomes(spec: SdpoSpec, expected: float) -> None:
    term = term_of(spec)
    assert (term.count, term.items) == (1, 1)
    assert term.total.item() == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize(
    ("spec", "gradient", "removed"),
    [
        # forward: S - T
        (SdpoSpec(beta=0.0), (-0.4, 0.4), None),
        (SdpoSpec(beta=0.0, temperature=2.0), (-0.125, 0.125), None),
        # A quarter of .368064: the same direction, a quarter as long.
        (SdpoSpec(beta=0.0, token_bound=0.092016), (-0.1, 0.1), 0.75),
        (SdpoSpec(beta=0.0, token_bound=1.0), (-0.4, 0.4), 0.0),
        # -.1 log S_1 alone is left, .1 * (S - e_1): away from the teacher. |(-.45, .45)| is taken
        # of |(-.4, .4)|.
        (SdpoSpec(beta=0.0, token_clip=0.05), (0.05, -0.05), 1.125),
        (SdpoSpec(beta=0.0, token_clip=10.0), (-0.4, 0.4), 0.0),
    ],
)
def test_what_a_bound_and_a_clip_do_to_the_gradient(
    spec: SdpoSpec, gradient: tuple[float, float], removed: float | None
) -> None:
    student = logits(S).requires_grad_()
    term = term_of(spec, student)
    (found,) = torch.autograd.grad(term.total, student)
    assert found[0].tolist() == pytest.approx(gradient, abs=1e-6)
    if removed is None:
        assert not term.shares
    else:
        part, whole = term.shares["gradient_removed"]
        assert (part / whole).item() == pytest.approx(removed, abs=2e-6)


@pytest.mark.parametrize("k", [None, 4])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("bound", [{"token_bound": 0.05}, {"token_clip": 0.01}])
def test_the_gradient_removed_is_that_of_autograd(
    bound: dict[str, float], beta: float, k: int | None
) -> None:
    """Sums over tokens and all logits, also those that a top-k's tail holds together."""
    draws = torch.Generator().manual_seed(4)
    student = torch.randn(6, 11, generator=draws).requires_grad_()
    teacher = torch.randn(6, 11, generator=draws)
    given = (
        TeacherDistribution(teacher) if k is None else TeacherDistribution(None, *top_k(teacher, k))
    )
    zero = torch.zeros(6)
    temperature = 1.0 if k else 2.0
    specs = [SdpoSpec(beta=beta, temperature=temperature, **more) for more in ({}, bound)]
    terms = [sdpo(student, given, zero.long(), zero, spec) for spec in specs]
    full, kept = (torch.autograd.grad(term.total, student)[0] for term in terms)
    part, whole = terms[1].shares["gradient_removed"]
    assert part.item() == pytest.approx((full - kept).abs().sum().item(), rel=1e-4)
    assert whole.item() == pytest.approx(full.abs().sum().item(), rel=1e-4)
    assert part / whole > 0.01


def test_shares_are_of_the_sums_over_micro_batches_and_ranks() -> None:
    """(1 + 2 + 3) / (2 + 4 + 6), not the mean of three shares; a fact is a mean over tokens."""

    def tally(tokens: int, *terms: LossTerm) -> LossAccumulator:
        made = LossAccumulator({"sdpo": 1.0}, {"sdpo": tokens})
        for term in terms:
            made.add({"sdpo": term})
        return made

    def term(tokens: int, part: float, whole: float, fact: float) -> LossTerm:
        pair = (torch.tensor(part), torch.tensor(whole))
        zero = torch.zeros(tokens)
        return LossTerm(zero, tokens, tokens, {"seen": torch.tensor(fact)}, {"removed": pair})

    ours, theirs = (
        tally(6, term(1, 1.0, 2.0, 3.0), term(2, 2.0, 1.0, 0.0)),
        tally(6, term(3, 3.0, 9.0, 9.0)),
    )
    ours.merge([ours.sums(), theirs.sums()], lambda _: None, {})
    found = ours.terms({})["sdpo"]
    assert (found["removed"], found["seen"]) == (0.5, 2.0)
    nothing = tally(0, term(0, 0.0, 0.0, 0.0)).terms({})["sdpo"]
    assert (nothing["removed"], nothing["seen"]) == (0.0, 0.0)


def test_j_over_beta_tends_to_the_forward_kl() -> None:
    """The special case at 0 is the limit of J / beta, not of J itself, which tends to 0."""
    student, teacher = torch.tensor([S]).log(), torch.tensor([T]).log()
    found = term_of(SdpoSpec(beta=1e-3), student, teacher).total.item() / 1e-3
    assert found == pytest.approx(0.368064 - 0.64e-3 / 2, abs=1e-4)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_it_is_the_jsd_of_doc_kl(beta: float) -> None:
    draws = torch.Generator().manual_seed(3)
    student = torch.randn(6, 11, generator=draws).requires_grad_()
    teacher = TeacherDistribution(logits=torch.randn(6, 11, generator=draws))
    assert teacher.logits is not None
    for given in (teacher, TeacherDistribution(None, *top_k(teacher.logits, 4))):
        spec = SdpoSpec(beta=beta)
        term = sdpo(student, given, torch.zeros(6).long(), torch.zeros(6), spec)
        reference, count = doc_kl(student, given, loss_form("jsd", beta=beta))
        assert term.count == count == 6
        assert term.total.item() == pytest.approx(reference.item(), rel=1e-5)
        ours, theirs = (torch.autograd.grad(x, student)[0] for x in (term.total, reference))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


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
    "spec",
    [
        SdpoSpec(),
        SdpoSpec(beta=0.0),
        SdpoSpec(beta=1.0),
        SdpoSpec(token_bound=0.1),
        SdpoSpec(token_clip=0.1),
        SdpoSpec(variant="sampled"),
    ],
)
def test_no_turn_gives_zero_and_no_gradient(spec: SdpoSpec) -> None:
    student = torch.empty(0, 9, requires_grad=True)
    term = term_of(spec, student, torch.empty(0, 9))
    assert (term.total.item(), term.count) == (0.0, 0)
    term.total.backward()
    assert student.grad is not None


@pytest.mark.parametrize(
    "spec", [SdpoSpec(), SdpoSpec(token_bound=0.1), SdpoSpec(variant="sampled")]
)
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
        {"token_bound": 0.0},
        {"variant": "sampled", "token_bound": 1.0},
        {"token_bound": 1.0, "token_clip": 0.05},
        {"variant": "sampled", "temperature": 2.0},
    ],
)
def test_what_cannot_be_computed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(wrong)[-1]):
        SdpoSpec(**wrong)
