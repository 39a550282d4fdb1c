"""grpo: values worked by hand, and a plain padded reference in Python floats."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from cartridge_forge.plugins.episodes.losses.grpo import (
    distilled,
    grpo,
    grpo_count,
    k3_divergence,
    mismatch_weight,
)
from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec, MismatchSpec

REDUCTIONS = get_args(GrpoSpec.model_fields["reduction"].annotation)
PLAIN = {"mismatch": None}
SHAPES = [
    GrpoSpec(
        ratio=ratio, reduction=reduction, max_length=8 if reduction == "dr_grpo" else None, **more
    )
    for ratio in ("token", "sequence")
    for reduction in REDUCTIONS
    for more in (
        {"mismatch": None},
        {"mismatch": MismatchSpec(level="token", mode="truncate", high=1.2), "dual_clip": 1.5},
        {"mismatch": MismatchSpec(level="sequence", mode="mask", high=1.2), "kl": 0.3},
        {"mismatch": MismatchSpec(level="token", mode="band", high=1.2, low=0.9)},
        {"mismatch": MismatchSpec(level="sequence", mode="band", high=1.5, low=0.7)},
    )
]


def f(*values: float) -> Tensor:
    return torch.tensor(values)


def value(spec: GrpoSpec, pi: Tensor, old: Tensor, advantages: Tensor, lengths: list[int]) -> float:
    term = grpo(pi, old, advantages, lengths, spec)
    return (term.total / term.count).item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [(1.5, 1.0, -1.28), (1.5, -1.0, 1.5), (0.5, 1.0, -0.5), (0.5, -1.0, 0.8)],
)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_clipping(level: str, ratio: float, advantage: float, loss: float) -> None:
    spec = GrpoSpec(ratio=level, clip_low=0.2, clip_high=0.28, mismatch=None)
    term = grpo(f(math.log(ratio) - 1), f(-1.0), f(advantage), [1], spec)
    assert term.total.item() == pytest.approx(loss, abs=1e-6)
    # Only where the clipped side is the smaller gain is the gradient cut.
    clipped = loss not in (1.5, -0.5)
    assert term.facts["clipped"].item() == clipped
    pi = f(math.log(ratio) - 1).requires_grad_()
    (gradient,) = torch.autograd.grad(grpo(pi, f(-1.0), f(advantage), [1], spec).total, pi)
    assert gradient.item() == pytest.approx(0.0 if clipped else -ratio * advantage, abs=1e-6)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("grpo", 0.0), ("bnpo", 1 / 3), ("dapo", 1 / 3), ("dr_grpo", 0.125)]
)
def test_reductions(reduction: str, expected: float) -> None:
    """A = +1 over 2 tokens and -1 over 4: their losses sum to 2, over 2 * 8 or 6; as means to 0."""
    spec = GrpoSpec(reduction=reduction, max_length=8 if reduction == "dr_grpo" else None, **PLAIN)
    pi, advantages = torch.full((6,), -0.7), f(1, 1, -1, -1, -1, -1)
    assert value(spec, pi, pi, advantages, [2, 4]) == pytest.approx(expected, abs=1e-6)


def test_on_policy_the_gradient_is_minus_the_advantage() -> None:
    """old = pi without gradient: ratio 1 exactly, and d loss / d pi_t = -A_t / tokens."""
    pi = f(-0.3, -1.2, -2.0).requires_grad_()
    term = grpo(pi, pi.detach(), f(2.0, 2.0, -1.0), [2, 1], GrpoSpec(**PLAIN))
    assert term.facts["ratio"].item() == 3.0
    (gradient,) = torch.autograd.grad(term.total / term.count, pi)
    assert gradient.tolist() == pytest.approx([-2 / 3, -2 / 3, 1 / 3])


def test_the_sequence_ratio_is_the_geometric_mean() -> None:
    """Ratios 1.1 and .9 of one episode: sqrt(.99) on both tokens; the second is alone: 1.2."""
    pi = f(math.log(1.1), math.log(0.9), math.log(1.2))
    term = grpo(pi, torch.zeros(3), f(1, 1, 1), [2, 1], GrpoSpec(ratio="sequence", **PLAIN))
    assert term.total.item() == pytest.approx(-2 * math.sqrt(0.99) - 1.2, abs=1e-6)


def test_dual_clip_bounds_what_a_bad_token_may_cost() -> None:
    """Ratio 5, A = -2: 10 without, 3 * 2 with a bound of 3; a good token is left alone."""
    pi, old = f(math.log(5), math.log(5)), torch.zeros(2)
    free = grpo(pi, old, f(-2, 2), [2], GrpoSpec(**PLAIN)).total
    bound = grpo(pi, old, f(-2, 2), [2], GrpoSpec(dual_clip=3.0, **PLAIN)).total
    assert free.item() == pytest.approx(10 - 2 * 1.28, abs=1e-5)
    assert bound.item() == pytest.approx(6 - 2 * 1.28, abs=1e-5)


def test_k3() -> None:
    assert k3_divergence(f(-1.0), f(-0.7)).item() == pytest.approx(0.049859, abs=5e-7)
    assert k3_divergence(f(-1.0, -2.0), f(-1.0, -2.0)).tolist() == [0.0, 0.0]
    term = grpo(f(-1.0), f(-1.0), f(1.0), [1], GrpoSpec(kl=2.0, **PLAIN), ref=f(-0.7))
    assert term.total.item() == pytest.approx(-1 + 2 * 0.049859, abs=2e-6)
    assert term.facts["k3"].item() == pytest.approx(0.049859, abs=5e-7)


def test_k3_pulls_back_to_the_reference() -> None:
    """d k3 / d pi = 1 - exp(ref - pi)."""
    pi = f(-1.0).requires_grad_()
    (gradient,) = torch.autograd.grad(k3_divergence(pi, f(-0.7)).sum(), pi)
    assert gradient.item() == pytest.approx(1 - math.exp(0.3), abs=1e-6)


@pytest.mark.parametrize(
    ("level", "mode", "weights", "corrected"),
    [
        # exp(old - sampler): 3, 1.5, .25 | 2; as sequences 3 * 1.5 * .25 = 1.125 | 2
        ("token", "truncate", [2, 1.5, 0.25, 2], [1, 0, 0, 0]),
        ("token", "mask", [0, 1.5, 0.25, 2], [1, 0, 0, 0]),
        ("token", "band", [0, 1.5, 0, 2], [1, 0, 1, 0]),
        ("sequence", "truncate", [1.125, 1.125, 1.125, 2], [0, 0, 0, 0]),
        ("sequence", "mask", [1.125, 1.125, 1.125, 2], [0, 0, 0, 0]),
        ("sequence", "band", [1.125, 1.125, 1.125, 2], [0, 0, 0, 0]),
    ],
)
def test_mismatch(level: str, mode: str, weights: list[float], corrected: list[float]) -> None:
    sampler = torch.full((4,), -1.0)
    old = (sampler + f(3, 1.5, 0.25, 2 - 1e-6).log()).requires_grad_()
    weight, out = mismatch_weight(old, sampler, [3, 1], MismatchSpec(level=level, mode=mode))
    assert not weight.requires_grad
    assert weight.tolist() == pytest.approx(weights, abs=1e-5)
    assert out.tolist() == corrected


def test_sequences_outside_the_band_are_dropped_whole() -> None:
    sampler = torch.zeros(5)
    old = f(3, 1, 0.25, 0.9, 1).log()  # products 3 | .225 | 1
    weight, out = mismatch_weight(
        old, sampler, [2, 2, 1], MismatchSpec(level="sequence", mode="band")
    )
    assert weight.tolist() == pytest.approx([0, 0, 0, 0, 1])
    assert out.tolist() == [1, 1, 1, 1, 0]
    weight, _ = mismatch_weight(
        old, sampler, [2, 2, 1], MismatchSpec(level="sequence", mode="truncate")
    )
    assert weight.tolist() == pytest.approx([2, 2, 0.225, 0.225, 1])


def test_the_log_ratio_is_bounded() -> None:
    wide = MismatchSpec(high=1e12)
    sampler = f(-90.0, float("-inf"), 0.0)
    weight, _ = mismatch_weight(torch.tensor([0.0, 0.0, -90.0]), sampler, [3], wide)
    assert weight.log().tolist() == pytest.approx([20, 20, -20])


def test_distillation_as_reward() -> None:
    """A nat that the student is surer than the teacher costs the price."""
    student = f(-0.5, -2.0).requires_grad_()
    found = distilled(f(1.0, 1.0), student, f(-1.5, -1.0), 0.25)
    assert found.tolist() == pytest.approx([0.75, 1.25])
    assert not found.requires_grad


def by_hand(
    episodes: list[list[tuple[float, float, float, float]]],
    advantages: list[float],
    spec: GrpoSpec,
) -> float:
    """Token by token in Python floats; an episode is a list of (pi, old, sampler, ref)."""
    means, total, tokens = [], 0.0, 0
    for tokens_of, a in zip(episodes, advantages, strict=True):
        losses = []
        for pi, old, sampler, ref in tokens_of:
            log_ratio, log_weight = pi - old, old - sampler
            if spec.ratio == "sequence":
                log_ratio = sum(p - o for p, o, _, _ in tokens_of) / len(tokens_of)
            if spec.mismatch and spec.mismatch.level == "sequence":
                log_weight = sum(o - s for _, o, s, _ in tokens_of)
            ratio = math.exp(log_ratio)
            bounded = min(max(ratio, 1 - spec.clip_low), 1 + spec.clip_high)
            loss = -min(ratio * a, bounded * a)
            if spec.dual_clip and a < 0:
                loss = min(loss, -spec.dual_clip * a)
            if spec.mismatch:
                weight, m = math.exp(log_weight), spec.mismatch
                if m.mode == "truncate":
                    weight = min(weight, m.high)
                elif weight > m.high or (m.mode == "band" and weight < m.low):
                    weight = 0.0
                loss *= weight
            losses.append(loss + spec.kl * (math.exp(ref - pi) - (ref - pi) - 1))
        means.append(sum(losses) / len(losses))
        total, tokens = total + sum(losses), tokens + len(losses)
    if spec.reduction == "grpo":
        return sum(means) / len(means)
    if spec.reduction == "dr_grpo":
        assert spec.max_length
        return total / (len(episodes) * spec.max_length)
    return total / tokens


@given(data=st.data(), spec=st.sampled_from(SHAPES))
def test_any_batch_equals_the_loops(data: st.DataObject, spec: GrpoSpec) -> None:
    """And in any order, and cut into any micro-batches at episodes."""
    nat = st.floats(-1.5, 0.0)
    near = st.tuples(nat, nat, nat, nat)
    drawn: list[tuple[list[tuple[float, ...]], float]] = data.draw(
        st.lists(
            st.tuples(st.lists(near, min_size=1, max_size=5), st.floats(-2, 2)),
            min_size=1, max_size=5,
        )
    )  # fmt: skip
    expected = by_hand([e for e, _ in drawn], [a for _, a in drawn], spec)  # type: ignore[misc]

    def term(some: list[Any]) -> tuple[float, int]:
        flat = torch.tensor([t for e, _ in some for t in e], dtype=torch.float64).T
        lengths = [len(e) for e, _ in some]
        advantages = torch.tensor([a for _, a in some], dtype=torch.float64)
        advantages = advantages.repeat_interleave(torch.tensor(lengths))
        found = grpo(flat[0], flat[1], advantages, lengths, spec, sampler=flat[2], ref=flat[3])
        assert found.items == sum(lengths)
        return found.total.item(), found.count

    shuffled = data.draw(st.permutations(drawn))
    cut = data.draw(st.integers(0, len(drawn)))
    parts = [term(part) for part in (shuffled[:cut], shuffled[cut:]) if part]
    total, count = (sum(x) for x in zip(*parts, strict=True))
    assert total / count == pytest.approx(expected, abs=1e-9)
    assert term(drawn)[0] / count == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("spec", SHAPES)
def test_no_episode_gives_zero_and_a_finite_gradient(spec: GrpoSpec) -> None:
    pi = torch.empty(0, requires_grad=True)
    none = torch.empty(0)
    term = grpo(pi, none, none, [], spec, sampler=none, ref=none)
    assert (term.total.item(), term.count, grpo_count([], spec)) == (0.0, 0, 0)
    term.total.backward()
    assert pi.grad is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"baseline": "mean"},
        {"ratio": "word"},
        {"reduction": "sum"},
        {"clip_low": 1.5},
        {"dual_clip": 1.0},
        {"reduction": "dr_grpo"},
        {"max_length": 8},
        {"kl": -1.0},
        {"distill": -1.0},
    ],
)
def test_what_cannot_be_computed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="max_length" if "dr_grpo" in wrong.values() else next(iter(wrong))
    ):
        GrpoSpec(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"level": "word"}, {"mode": "drop"}, {"low": 1.1}, {"high": 0.9}]
)
def test_a_mismatch_that_touches_agreement_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        MismatchSpec(**wrong)
