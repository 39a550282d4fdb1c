"""doc_kl: values worked out on paper (to six digits), and the laws that tie its forms together."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import get_args

import pytest
import torch
from channel_setup import loss_form
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cartridge_forge.learning.losses.doc_kl import (
    divergence,
    doc_kl,
    jensen_shannon,
    log_tail,
)
from cartridge_forge.learning.teacher import TeacherDistribution, joined, top_k
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.sections import LossSpec

Probs = tuple[float, ...]
DIRECTIONS = get_args(LossSpec.model_fields["direction"].annotation)
FORMS = get_args(LossSpec.model_fields["form"].annotation)
TWO: tuple[Probs, Probs] = ((0.5, 0.5), (0.9, 0.1))  # student, teacher
THREE: tuple[Probs, Probs] = ((0.5, 0.3, 0.2), (0.7, 0.2, 0.1))
SPECS = [
    loss_form(direction, form=form)
    for direction in DIRECTIONS
    for form in FORMS
    if form != "pairs" or direction == "cross_entropy"
]


def logits(*rows: Probs) -> Tensor:
    """Logits of the given distributions, each shifted by its own constant."""
    return torch.tensor(rows).log() + torch.arange(1.0, len(rows) + 1)[:, None]


def value(pair: tuple[Probs, Probs], spec: LossSpec, k: int | None = None) -> float:
    """doc_kl of one token."""
    teacher = logits(pair[1])
    given = (
        TeacherDistribution(logits=teacher)
        if k is None
        else TeacherDistribution(None, *top_k(teacher, k))
    )
    total, count = doc_kl(logits(pair[0]), given, spec)
    assert count == (k if spec.form == "pairs" and k else 1)
    return total.item()


def random_pair(seed: int, tokens: int, vocab: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    student = torch.randn(tokens, vocab, generator=random)
    return student.requires_grad_(), torch.randn(tokens, vocab, generator=random)


def loss_and_gradient(
    student: Tensor, teacher: TeacherDistribution, spec: LossSpec
) -> tuple[float, Tensor]:
    total, _ = doc_kl(student, teacher, spec)
    (gradient,) = torch.autograd.grad(total, student)
    return total.item(), gradient


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (loss_form("jsd", beta=0.0), 0.368064),
        (loss_form("jsd", beta=1.0), 0.510826),
        (loss_form("jsd", beta=0.5), 0.101749),
        (loss_form("forward"), 0.368064),
        (loss_form("reverse"), 0.510826),
        (loss_form("forward", temperature=2.0), 0.130812),
        (loss_form("jsd", beta=0.0, temperature=2.0), 0.130812),
        (loss_form("cross_entropy"), 0.693147),  # -ln .5, whatever the teacher
    ],
)
def test_two_tokens(spec: LossSpec, expected: float) -> None:
    assert value(TWO, spec) == pytest.approx(expected, abs=6e-7)


@pytest.mark.parametrize(
    ("direction", "form", "k", "expected"),
    [
        ("forward", "tail", None, 0.085123),
        ("reverse", "tail", None, 0.092033),
        ("forward", "tail", 1, 0.082283),
        ("reverse", "tail", 1, 0.087177),
        ("forward", "renormalised", 2, 0.053814),
        ("reverse", "renormalised", 2, 0.059537),
        ("forward", "tail", 2, 0.085123),  # V = 3: the tail is the third token
        ("reverse", "tail", 2, 0.092033),
        # -.7 ln .5 - .2 ln .3 - .1 ln .2, then only its first two terms
        ("cross_entropy", "tail", 2, 0.886941),
        ("cross_entropy", "tail", 3, 0.886941),  # nothing is left for a tail: none is added
        ("cross_entropy", "pairs", 3, 0.886941),
        ("cross_entropy", "pairs", 2, 0.725998),
    ],
)
def test_three_tokens(direction: str, form: str, k: int | None, expected: float) -> None:
    assert value(THREE, loss_form(direction, form=form), k) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("beta", [1e-1, 1e-2, 1e-3])
def test_jsd_over_beta_tends_to_forward_kl(beta: float) -> None:
    """J(b)/b = KL(T||S) - b/2 * chi2(T||S) + O(b^2), with chi2 = .16/.5 + .16/.5 = .64 here."""
    log_s, log_t = (torch.tensor([p], dtype=torch.float64).log() for p in TWO)
    ratio = jensen_shannon(log_s, log_t, beta).item() / beta
    assert ratio == pytest.approx(0.368064 - beta / 2 * 0.64, abs=beta**2 + 1e-4)
    # and from the other end J(b)/(1-b) to the reverse KL
    ratio = jensen_shannon(log_s, log_t, 1 - beta).item() / beta
    chi2 = 0.16 / 0.9 + 0.16 / 0.1
    assert ratio == pytest.approx(0.510826 - beta / 2 * chi2, abs=10 * beta**2 + 1e-4)


def test_jsd_of_one_half_is_symmetric_and_at_most_ln_2() -> None:
    student, teacher = random_pair(3, 8, 20)
    log_s, log_t = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    forth, back = jensen_shannon(log_s, log_t, 0.5), jensen_shannon(log_t, log_s, 0.5)
    torch.testing.assert_close(forth, back, rtol=0, atol=1e-6)
    assert forth.max() < math.log(2)


def test_gradients_worked_by_hand() -> None:
    """d forward/dz = S - T; d reverse/dz = S * (log S/T - KL(S||T))."""
    for direction, expected in [
        ("forward", [-0.2, 0.1, 0.1]),
        ("cross_entropy", [-0.2, 0.1, 0.1]),
        (
            "reverse",
            [s * (math.log(s / t) - 0.092033) for s, t in zip(*THREE, strict=True)],
        ),
    ]:
        student = logits(THREE[0]).requires_grad_()
        _, gradient = loss_and_gradient(
            student, TeacherDistribution(logits=logits(THREE[1])), loss_form(direction)
        )
        assert gradient[0].tolist() == pytest.approx(expected, abs=1e-6)


def test_gradient_under_temperature() -> None:
    """d forward/dz = (S' - T') / temperature, S' and T' at that temperature."""
    student = logits(TWO[0]).requires_grad_()
    _, gradient = loss_and_gradient(
        student, TeacherDistribution(logits=logits(TWO[1])), loss_form(temperature=2.0)
    )
    assert gradient[0].tolist() == pytest.approx([-0.125, 0.125], abs=1e-6)  # T' = (.75, .25)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.direction}-{s.form}")
def test_top_k_of_the_whole_vocabulary_equals_full_logits(spec: LossSpec) -> None:
    student, teacher = random_pair(5, 7, 23)
    full = loss_and_gradient(student, TeacherDistribution(logits=teacher), spec)
    whole = loss_and_gradient(student, TeacherDistribution(None, *top_k(teacher, 23)), spec)
    assert whole[0] == pytest.approx(full[0], rel=1e-6)
    torch.testing.assert_close(whole[1], full[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_the_last_step_from_tail_to_whole_is_no_step(direction: str) -> None:
    """k = V - 1 leaves one token in the tail: the same distribution, so the same loss."""
    student, teacher = random_pair(6, 7, 23)
    spec = loss_form(direction)
    nearly = loss_and_gradient(student, TeacherDistribution(None, *top_k(teacher, 22)), spec)
    full = loss_and_gradient(student, TeacherDistribution(logits=teacher), spec)
    # The tail is 1 - the rest in float32, so a tail of 1e-3 has four digits left.
    assert nearly[0] == pytest.approx(full[0], abs=1e-4)
    torch.testing.assert_close(nearly[1], full[1], rtol=0, atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), st.integers(2, 30))
def test_the_tail_loss_grows_with_k_by_what_one_token_tells(seed: int, vocab: int) -> None:
    """Chain rule: taking one more token out of the tail adds the tail's mass times the divergence
    of "that token or another of the tail", a number >= 0 that goes to 0 with the mass."""
    student, teacher = random_pair(seed, 1, vocab)
    s, t = student.detach().double().softmax(-1)[0], teacher.double().softmax(-1)[0]
    order = t.argsort(descending=True)
    s, t = s[order], t[order]
    losses = [
        doc_kl(student, TeacherDistribution(None, *top_k(teacher, k)), loss_form())[0].item()
        for k in range(1, vocab + 1)
    ]
    for k in range(1, vocab):
        rest_s, rest_t = s[k:].sum(), t[k:].sum()
        split = t[k] * torch.log((t[k] / rest_t) / (s[k] / rest_s))
        if k + 1 < vocab:
            more_s, more_t = s[k + 1 :].sum(), t[k + 1 :].sum()
            split += more_t * torch.log((more_t / rest_t) / (more_s / rest_s))
        assert split > -1e-9
        assert losses[k] - losses[k - 1] == pytest.approx(split.item(), abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 9999), st.sampled_from(["reverse", "jsd"]))
def test_a_coarser_view_never_shows_more_divergence(seed: int, direction: str) -> None:
    student, teacher = random_pair(seed, 5, 12)
    losses = [
        doc_kl(student, TeacherDistribution(None, *top_k(teacher, k)), loss_form(direction))[
            0
        ].item()
        for k in range(1, 13)
    ]
    assert losses[0] > -1e-6
    assert all(late >= early - 1e-4 for early, late in pairwise(losses))


def test_the_sum_and_the_denominators() -> None:
    """Tokens add up; (token, k) pairs are counted by the form "pairs" alone."""
    student, teacher = random_pair(8, 4, 9)
    given = TeacherDistribution(None, *top_k(teacher, 3))
    for spec in SPECS:
        total, count = doc_kl(student, given, spec)
        assert count == (12 if spec.form == "pairs" else 4)
        parts = [
            doc_kl(
                student[n : n + 1], TeacherDistribution(None, *top_k(teacher[n : n + 1], 3)), spec
            )[0]
            for n in range(4)
        ]
        assert total.item() == pytest.approx(sum(p.item() for p in parts), rel=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.direction}-{s.form}")
def test_no_tokens_give_zero_and_no_gradient(spec: LossSpec) -> None:
    student = torch.empty(0, 9, requires_grad=True)
    none = torch.empty(0, 4)
    for teacher in (
        TeacherDistribution(logits=torch.empty(0, 9)),
        TeacherDistribution(None, none.int(), none),
    ):
        total, count = doc_kl(student, teacher, spec)
        assert (total.item(), count) == (0.0, 0)
        (total / max(count, 1)).backward()
        assert student.grad is not None
        assert student.grad.shape == (0, 9)


def test_a_channel_without_tokens_leaves_others_gradients_alone() -> None:
    student = torch.randn(3, 9, requires_grad=True)
    total, _ = doc_kl(student[:0], TeacherDistribution(logits=torch.empty(0, 9)), loss_form())
    total.backward()
    assert student.grad is not None
    assert torch.equal(student.grad, torch.zeros(3, 9))


@pytest.mark.parametrize("tokens", [2, 4])
def test_another_number_of_tokens_is_our_own_bug(tokens: int) -> None:
    student, _ = random_pair(1, 3, 9)
    other = torch.zeros(tokens, 9)
    for teacher in (TeacherDistribution(logits=other), TeacherDistribution(None, *top_k(other, 2))):
        with pytest.raises(AssertionError, match=f"has 3 response tokens and teacher {tokens}"):
            doc_kl(student, teacher, loss_form())


FAR = 1e4  # logits that leave the other token a probability of exp(-20000) = 0


@pytest.mark.parametrize("k", [None, 1, 2])
@pytest.mark.parametrize(
    ("direction", "expected", "slope"),
    [
        ("forward", 2 * FAR, [1.0, -1.0]),
        ("cross_entropy", 2 * FAR, [1.0, -1.0]),
        ("reverse", 2 * FAR, [0.0, 0.0]),
        ("jsd", math.log(2), [0.0, 0.0]),
    ],
)
def test_certain_and_opposed(
    direction: str, expected: float, slope: list[float], k: int | None
) -> None:
    student = torch.tensor([[FAR, -FAR]], requires_grad=True)
    teacher = torch.tensor([[-FAR, FAR]])
    given = (
        TeacherDistribution(logits=teacher)
        if k is None
        else TeacherDistribution(None, *top_k(teacher, k))
    )
    total, gradient = loss_and_gradient(student, given, loss_form(direction))
    if k == 1:  # a tail of at least 1e-7 on both sides: log 1e-7 where it was -20000
        assert total == pytest.approx(
            {"reverse": -math.log(1e-7), "jsd": math.log(2)}.get(direction, expected), rel=1e-3
        )
        assert gradient.abs().max() < 1.01
    else:
        assert total == pytest.approx(expected, rel=1e-6)
        assert gradient[0].tolist() == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.direction}-{s.form}")
def test_certain_and_agreed(spec: LossSpec) -> None:
    """Every form is 0 with no gradient, also where the top k hold all of the mass."""
    both = torch.tensor([[FAR, -FAR, 0.0]])
    for k in (1, 2, 3):
        student = both.clone().requires_grad_()
        total, gradient = loss_and_gradient(
            student, TeacherDistribution(None, *top_k(both, k)), spec
        )
        assert total == pytest.approx(0.0, abs=2e-6)  # cross entropy of the 1e-7 tail: 1.6e-6
        assert gradient.abs().max() < 1e-6


def test_a_teacher_s_tail_of_nothing_is_bounded() -> None:
    """log(1e-7) and no gradient where everything is held; log(.25) with one where it is not."""
    top = torch.tensor([[0.0], [math.log(0.75)]], requires_grad=True)
    tail = log_tail(top)
    assert tail[:, 0].tolist() == pytest.approx([math.log(1e-7), math.log(0.25)], abs=1e-5)
    tail.sum().backward()
    assert top.grad is not None
    assert top.grad[:, 0].tolist() == pytest.approx([0.0, -3.0], abs=1e-5)  # -p / (1 - p)


def test_a_teacher_may_rule_tokens_out() -> None:
    """0 log 0 = 0: a probability of exactly zero on the teacher's side."""
    log_t = torch.tensor([[0.5, 0.5, 0.0]]).log()
    log_s = torch.tensor([[0.25, 0.25, 0.5]]).log().requires_grad_()
    loss = divergence(log_s, log_t, loss_form())
    assert loss.item() == pytest.approx(math.log(2), abs=1e-6)
    loss.backward()
    assert log_s.grad is not None
    assert log_s.grad[0].tolist() == pytest.approx([-0.5, -0.5, 0.0], abs=1e-6)


def test_top_k_is_most_likely_first_under_the_whole_vocabulary() -> None:
    indices, logprobs = top_k(logits((0.2, 0.5, 0.3)), 2)
    assert (indices.dtype, logprobs.dtype) == (torch.int32, torch.float32)
    assert indices.tolist() == [[1, 2]]
    assert logprobs.exp()[0].tolist() == pytest.approx([0.5, 0.3])
    assert top_k(logits((0.2, 0.5, 0.3)), 20)[0].tolist() == [[1, 2, 0]]


def test_temperature_needs_the_whole_distribution() -> None:
    """A temperature moves mass between the top k and a tail that only the teacher could split."""
    student, teacher = random_pair(1, 2, 9)
    with pytest.raises(SpecError, match=r"set teacher\.top_k: full"):
        doc_kl(student, TeacherDistribution(None, *top_k(teacher, 3)), loss_form(temperature=2.0))


def test_parts_are_joined_in_the_order_of_the_samples() -> None:
    """Samples of 2, 0, 1 and 3 tokens, scored as (3, 0) and (2, 1)."""
    first = TeacherDistribution(
        indices=torch.tensor([[30], [31], [32], [0], [1]]), logprobs=torch.rand(5, 1)
    )
    second = TeacherDistribution(indices=torch.tensor([[20]]), logprobs=torch.rand(1, 1))
    whole = joined([((3, 0), first), ((2, 1), second)], [2, 0, 1, 3])
    assert whole.indices is not None
    assert whole.indices.flatten().tolist() == [0, 1, 20, 30, 31, 32]
    assert whole.logprobs is not None
    assert first.logprobs is not None
    assert torch.equal(whole.logprobs[3:], first.logprobs[:3])
    assert whole.logits is None
    assert joined([((0, 1), first)], [2, 3]) is first
    full = joined(
        [
            ((1,), TeacherDistribution(torch.ones(1, 4))),
            ((0,), TeacherDistribution(torch.zeros(2, 4))),
        ],
        [2, 1],
    )
    assert full.logits is not None
    assert full.logits.tolist() == [[0.0] * 4, [0.0] * 4, [1.0] * 4]


def in_float64(
    student: Tensor, teacher: Tensor, direction: str, k: int | None
) -> tuple[float, Tensor]:
    """The summed divergence and its gradient from probabilities in float64, in which an outcome of
    probability 0 is left out of its sum."""
    logits = student.detach().double().requires_grad_()
    s, t = logits.softmax(-1), teacher.double().softmax(-1)
    if k is not None:
        top = teacher.topk(k).indices
        s, t = (
            torch.cat([p.gather(-1, top), p.scatter(-1, top, 0).sum(-1, True)], -1) for p in (s, t)
        )

    def summed(p: Tensor, q: Tensor) -> Tensor:
        held = p.detach() > 0
        return (p[held] * q[held].log()).sum()

    if direction == "forward":
        total = summed(t, t) - summed(t, s)
    elif direction == "cross_entropy":
        total = -summed(t, s)
    elif direction == "reverse":
        total = summed(s, s) - summed(s, t)
    else:
        m = (s + t) / 2
        total = (summed(t, t) - summed(t, m) + summed(s, s) - summed(s, m)) / 2
    (gradient,) = torch.autograd.grad(total, logits)
    return total.item(), gradient


def ruled_out(logits: Tensor, tokens: tuple[int, ...]) -> Tensor:
    return logits.index_fill(-1, torch.tensor(tokens, dtype=torch.long), -math.inf)


@pytest.mark.parametrize("theirs", [(), (1, 4), (4, 6)])
@pytest.mark.parametrize("own", [(1, 4), (2, 3, 6, 7), (0, 5)])
@pytest.mark.parametrize("k", [None, 2, 4, 8])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_tokens_that_a_side_rules_out(
    direction: str, k: int | None, own: tuple[int, ...], theirs: tuple[int, ...]
) -> None:
    """Logits of -inf: 0 * -inf is 0 in the loss and in its gradient. One side alone may make the
    loss infinite (forward: the student's), and then no gradient is asked for."""
    draws = torch.Generator().manual_seed(2)
    student = ruled_out(torch.randn(5, 8, generator=draws), own).requires_grad_()
    # The likeliest are 0 and 5: a student that rules them out keeps nothing of the teacher's top 2.
    bias = torch.tensor([4.0, 1.0, 0.0, 0.0, 1.0, 3.0, 0.0, 0.0])
    teacher = ruled_out(torch.randn(5, 8, generator=draws) / 4 + bias, theirs)
    given = (
        TeacherDistribution(logits=teacher)
        if k is None
        else TeacherDistribution(None, *top_k(teacher, k))
    )
    expected, reference = in_float64(student, teacher, direction, k)
    total, gradient = loss_and_gradient(student, given, loss_form(direction))
    assert total == pytest.approx(expected, rel=1e-5)
    if math.isfinite(expected):
        torch.testing.assert_close(gradient, reference.float(), rtol=0, atol=1e-5)
        assert torch.equal(gradient[:, own], torch.zeros(5, len(own)))


@pytest.mark.parametrize(
    ("mass", "precision"), [(1e-3, 1e-3), (1e-5, 0.03), (1e-7, 1e-5), (1e-9, 1e-5), (1e-12, 1e-5)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_student_s_small_tail_keeps_its_loss_and_gradient(
    direction: str, mass: float, precision: float
) -> None:
    """The top 3 hold 1 - mass of the student and .8 of the teacher. Below 1e-6 the tail is summed
    exactly; above, it is 1 - (the rest) in float32, which has two digits at 1e-5."""
    draws = torch.Generator().manual_seed(9)
    shape = torch.tensor([[0.5, 0.3, 0.2]]).log()
    rest = torch.randn(1, 20, generator=draws).log_softmax(-1)
    student = torch.cat([shape + math.log1p(-mass), rest + math.log(mass)], -1).requires_grad_()
    teacher = torch.cat([shape.flip(-1) + math.log(0.8), rest.flip(-1) + math.log(0.2)], -1)
    assert set(top_k(teacher, 3)[0][0].tolist()) == {0, 1, 2}
    expected, reference = in_float64(student, teacher, direction, 3)
    total, gradient = loss_and_gradient(
        student, TeacherDistribution(None, *top_k(teacher, 3)), loss_form(direction)
    )
    assert total == pytest.approx(expected, rel=precision)
    assert gradient[:, 3:].abs().min() > 0
    torch.testing.assert_close(gradient[:, 3:].double(), reference[:, 3:], rtol=precision, atol=0)
    torch.testing.assert_close(gradient.double(), reference, rtol=precision, atol=1e-6)
