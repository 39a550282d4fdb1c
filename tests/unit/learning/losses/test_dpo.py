"""replay_dpo: the values of the objectives' table, the derivative by hand, stale references."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from learning.losses.dpo import is_stale, replay_dpo, summed_by_pair
from protocols.spec.objective import DpoSpec
from protocols.train_batch import PreferencePair

PAIR = PreferencePair("p", "a", (3,), (4, 5), (6, 7, 8, 9), -2.0, -3.0, 7)


def at(pi_c: float, pi_r: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([pi_c]).requires_grad_(), torch.tensor([pi_r]).requires_grad_()


def test_no_difference_is_ln_2() -> None:
    term = replay_dpo(*at(-2.0, -3.0), [PAIR], DpoSpec())
    assert term.total.item() == pytest.approx(0.693147, abs=5e-7)
    assert (term.count, term.facts["preferred"].item()) == (1, 0.0)


def test_a_difference_of_five() -> None:
    """(pi_c - ref_c) - (pi_r - ref_r) = 2 - -3 = 5; -log sigmoid(.5), slope -.1 * sigmoid(-.5)."""
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(beta=0.1))
    assert term.total.item() == pytest.approx(0.474077, abs=5e-7)
    assert term.facts["margin"].item() == 5.0
    assert term.facts["preferred"].item() == 1.0
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    assert up.item() == pytest.approx(-0.037754, abs=5e-7)
    assert down.item() == pytest.approx(0.037754, abs=5e-7)


def test_by_length() -> None:
    """2 nats over 2 tokens less -3 over 4: 1.75."""
    spec = DpoSpec(variant="dpo_length_normalised", beta=2.0)
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [PAIR], spec)
    assert term.facts["margin"].item() == 1.75
    assert term.total.item() == pytest.approx(math.log(1 + math.exp(-3.5)), abs=1e-6)
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    slope = 2 / (1 + math.exp(3.5))
    assert (up.item(), down.item()) == pytest.approx((-slope / 2, slope / 4), abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_derivative_by_hand_and_any_order(data: st.DataObject) -> None:
    """d loss / d pi_c = -beta * sigmoid(-beta m) / length, and the opposite for the rejected."""
    nats, length = st.floats(-30, 0), st.integers(1, 9)
    drawn = data.draw(
        st.lists(st.tuples(nats, nats, nats, nats, length, length), min_size=1, max_size=5)
    )
    spec = DpoSpec(variant=data.draw(st.sampled_from(["dpo", "dpo_length_normalised"])), beta=0.3)
    total, slopes = 0.0, []
    for c, r, ref_c, ref_r, n_c, n_r in drawn:
        n_c, n_r = (n_c, n_r) if spec.variant != "dpo" else (1, 1)
        margin = (c - ref_c) / n_c - (r - ref_r) / n_r
        total += math.log1p(math.exp(-0.3 * margin))
        slope = 0.3 / (1 + math.exp(0.3 * margin))
        slopes.append((-slope / n_c, slope / n_r))
    order = data.draw(st.permutations(range(len(drawn))))
    some = [drawn[i] for i in order]
    pairs = [
        replace(PAIR, chosen_ids=(1,) * n_c, rejected_ids=(2,) * n_r, ref_chosen=x, ref_rejected=y)
        for _, _, x, y, n_c, n_r in some
    ]
    chosen = torch.tensor([d[0] for d in some], dtype=torch.float64).requires_grad_()
    rejected = torch.tensor([d[1] for d in some], dtype=torch.float64).requires_grad_()
    term = replay_dpo(chosen, rejected, pairs, spec)
    assert term.total.item() == pytest.approx(total, abs=1e-9)
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    assert up.tolist() == pytest.approx([slopes[i][0] for i in order], abs=1e-9)
    assert down.tolist() == pytest.approx([slopes[i][1] for i in order], abs=1e-9)


def test_a_hopeless_pair_stays_finite() -> None:
    chosen, rejected = at(-4e4, 0.0)
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(beta=1.0))
    (slope,) = torch.autograd.grad(term.total, chosen)
    assert term.total.item() == pytest.approx(4e4, rel=1e-3)
    assert slope.item() == -1.0


@pytest.mark.parametrize("variant", ["dpo", "dpo_length_normalised"])
def test_no_pair_gives_zero_and_no_gradient(variant: str) -> None:
    logprobs = torch.empty(0, requires_grad=True)
    term = replay_dpo(*summed_by_pair(logprobs, []), [], DpoSpec(variant=variant))
    assert (term.total.item(), term.count) == (0.0, 0)
    term.total.backward()
    assert logprobs.grad is not None


def test_only_a_completion_s_own_tokens_are_summed() -> None:
    pairs = [PAIR, replace(PAIR, chosen_ids=(1,), rejected_ids=(2, 3))]
    chosen, rejected = summed_by_pair(torch.arange(9.0), pairs)
    assert chosen.tolist() == [0 + 1, 6]
    assert rejected.tolist() == [2 + 3 + 4 + 5, 7 + 8]


@pytest.mark.parametrize(
    ("version", "max_age", "stale"),
    [
        (7, 0, False),
        (8, 0, True),
        (9, 2, False),
        (10, 2, True),
        (999, None, False),
        (6, None, True),
    ],
)
def test_a_reference_is_of_its_version(version: int, max_age: int | None, stale: bool) -> None:
    assert is_stale(PAIR, version, max_age) == stale


@pytest.mark.parametrize(
    "wrong",
    [
        {"variant": "ipo"},
        {"beta": 0.0},
        {"max_reference_age": -1},
    ],
)
def test_what_cannot_be_computed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(wrong)[-1]):
        DpoSpec(**wrong)
