"""replay_dpo: the values of the objectives' table, the derivative by hand, stale references."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import bank_of, changed, do, scene
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.objectives.policy_scores import is_stale, summed_by_pair
from cartridge_forge.plugins.replay.dpo import replay_dpo
from cartridge_forge.plugins.replay.spec import DpoSpec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import PreferencePair

if TYPE_CHECKING:
    from twins import Twin

PAIR = PreferencePair("p", "a", (3,), (4, 5), (6, 7, 8, 9), -2.0, -3.0, 7)


VARIANTS = ("dpo", "dpo_length_normalised", "ipo", "simpo", "kto", "regression")


def at(pi_c: float, pi_r: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([pi_c]).requires_grad_(), torch.tensor([pi_r]).requires_grad_()


def test_no_difference_is_ln_2() -> None:
    term = replay_dpo(*at(-2.0, -3.0), [PAIR], DpoSpec(variant="dpo"))
    assert term.total.item() == pytest.approx(0.693147, abs=5e-7)
    assert (term.count, term.facts["preferred"].item()) == (1, 0.0)


def test_a_difference_of_five() -> None:
    """(pi_c - ref_c) - (pi_r - ref_r) = 2 - -3 = 5; -log sigmoid(.5), slope -.1 * sigmoid(-.5)."""
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(variant="dpo"))
    assert term.total.item() == pytest.approx(0.474077, abs=5e-7)
    assert term.facts["margin"].item() == 5.0
    assert term.facts["preferred"].item() == 1.0
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    assert up.item() == pytest.approx(-0.037754, abs=5e-7)
    assert down.item() == pytest.approx(0.037754, abs=5e-7)


def test_by_length() -> None:
    """2 nats over 2 tokens less -3 over 4: 1.75. The default, at its beta of 2."""
    spec = DpoSpec()
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [PAIR], spec)
    assert term.facts["margin"].item() == 1.75
    assert term.total.item() == pytest.approx(math.log(1 + math.exp(-3.5)), abs=1e-6)
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    slope = 2 / (1 + math.exp(3.5))
    assert (up.item(), down.item()) == pytest.approx((-slope / 2, slope / 4), abs=1e-6)


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
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(variant="dpo", beta=1.0))
    (slope,) = torch.autograd.grad(term.total, chosen)
    assert term.total.item() == pytest.approx(4e4, rel=1e-3)
    assert slope.item() == -1.0


def test_ipo_by_hand() -> None:
    """Margin 1.75 against a target of 1 / (2 * 0.5): 0.75 squared; slopes 1.5 / 2 and -1.5 / 4."""
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(variant="ipo"))
    assert term.total.item() == 0.5625
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    assert (up.item(), down.item()) == (0.75, -0.375)


def test_simpo_by_hand() -> None:
    """0 over 2 tokens less -6 over 4 is 1.5, whatever the reference; -log sigmoid(2 * 1.5 - 1)."""
    other = replace(PAIR, ref_chosen=-50.0, ref_rejected=math.nan, ref_version=-1)
    for pair in (PAIR, other):
        term = replay_dpo(*at(0.0, -6.0), [pair], DpoSpec(variant="simpo"))
        assert term.facts["margin"].item() == 1.5
        assert term.total.item() == pytest.approx(0.126928, abs=5e-7)
    wide = DpoSpec(variant="simpo", beta=2.5, gamma=0.75)
    assert replay_dpo(*at(0.0, -6.0), [PAIR], wide).total.item() == pytest.approx(
        math.log1p(math.exp(-3.0)), abs=5e-7
    )


def test_kto_by_hand() -> None:
    """Values 2 and -3: their mean is below 0, so z = 0. 1 - sigmoid(.2) = .450166 and
    1 - sigmoid(.3) = .425557, half of each."""
    term = replay_dpo(*at(0.0, -6.0), [PAIR], DpoSpec(variant="kto"))
    assert term.total.item() == pytest.approx(0.437861, abs=1e-6)
    assert (term.count, term.facts["reference_point"].item()) == (1, 0.0)
    weighed = DpoSpec(variant="kto", desirable=2.0, undesirable=0.5)
    term = replay_dpo(*at(0.0, -6.0), [PAIR], weighed)
    assert term.total.item() == pytest.approx(0.450166 + 0.425557 / 4, abs=1e-6)


def test_kto_s_reference_point_has_no_gradient() -> None:
    """Values 1 and 2: z = 1.5, and both sides are 1 - sigmoid(-.05) = .512497. The slope of the
    chosen is -.1 * sigmoid'(.05) / 2 = -.1 * .249844 / 2, as if z were a number."""
    chosen, rejected = at(-1.0, -1.0)
    term = replay_dpo(chosen, rejected, [PAIR], DpoSpec(variant="kto"))
    assert term.facts["reference_point"].item() == 1.5
    assert term.total.item() == pytest.approx(0.512497, abs=1e-6)
    up, down = torch.autograd.grad(term.total, (chosen, rejected))
    assert (up.item(), down.item()) == pytest.approx((-0.0124922, 0.0124922), abs=1e-7)


def test_regression_by_hand() -> None:
    """Values 1 and -.75 at beta 2: scores .880797 and .182426 against two votes of three and one;
    the squares .045852 and .022773, half of each."""
    pair = replace(PAIR, chosen_share=2 / 3, rejected_share=1 / 3)
    term = replay_dpo(*at(0.0, -6.0), [pair], DpoSpec(variant="regression"))
    assert term.total.item() == pytest.approx(0.0343123, abs=1e-6)
    # At the reference both scores are a half: (.25 + .25) / 2 for a unanimous vote.
    term = replay_dpo(*at(-2.0, -3.0), [PAIR], DpoSpec(variant="regression"))
    assert term.total.item() == 0.25


def test_a_divided_vote_is_smoothed() -> None:
    """Two of three votes: eps 1/6. At beta m = .5: 5/6 * .474077 + 1/6 * .974077."""
    pair = replace(PAIR, chosen_share=2 / 3, rejected_share=1 / 3)
    by_votes, plain = DpoSpec(variant="dpo"), DpoSpec(variant="dpo", smoothing="none")
    chosen, rejected = at(0.0, -6.0)
    term = replay_dpo(chosen, rejected, [pair], by_votes)
    assert term.total.item() == pytest.approx(0.557410, abs=5e-7)
    assert replay_dpo(*at(0.0, -6.0), [pair], plain).total.item() == pytest.approx(0.474077)
    # The slope is 0 where sigmoid(beta m) is 5/6, at m = 10 ln 5, and turns round beyond.
    chosen, rejected = at(-2.0 + 10 * math.log(5), -3.0)
    (slope,) = torch.autograd.grad(replay_dpo(chosen, rejected, [pair], by_votes).total, chosen)
    assert slope.item() == pytest.approx(0.0, abs=1e-7)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "regression"])
def test_a_unanimous_vote_is_not_smoothed(variant: str) -> None:
    smoothed, plain = (
        replay_dpo(*at(-1.0, -4.0), [PAIR], DpoSpec(variant=variant, smoothing=s)).total
        for s in ("votes", "none")
    )
    assert smoothed.item() == plain.item()


def test_the_chosen_text_s_own_likelihood() -> None:
    """.5 * (1.2 nats over 2 tokens) beside the loss of the pair."""
    spec = DpoSpec(variant="dpo", nll=0.5)
    chosen, rejected = at(-1.2, -3.0)
    term = replay_dpo(chosen, rejected, [PAIR], spec)
    plain = replay_dpo(*at(-1.2, -3.0), [PAIR], DpoSpec(variant="dpo"))
    assert term.total.item() == pytest.approx(plain.total.item() + 0.3, abs=1e-6)
    assert term.facts["nll"].item() == pytest.approx(0.6)
    assert "nll" not in plain.facts


Drawn = tuple[float, float, float, float, int, int, float, float]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def expected(drawn: Sequence[Drawn], spec: DpoSpec, point: float) -> float:
    """The loss over all pairs, in plain floats."""
    total = 0.0
    beta = spec.sharpness
    for c, r, ref_c, ref_r, n_c, n_r, share_c, share_r in drawn:
        better = {"simpo": c / n_c, "dpo": c - ref_c, "kto": c - ref_c}.get(
            spec.variant, (c - ref_c) / n_c
        )
        worse = {"simpo": r / n_r, "dpo": r - ref_r, "kto": r - ref_r}.get(
            spec.variant, (r - ref_r) / n_r
        )
        both = []
        for a, b in ((better, worse), (worse, better)):
            m = a - b
            both.append(
                {
                    "ipo": (m - 0.5 / beta) ** 2,
                    "simpo": math.log1p(math.exp(spec.gamma - beta * m)),
                    "kto": (
                        spec.desirable * (1 - sigmoid(beta * (a - point)))
                        + spec.undesirable * (1 - sigmoid(beta * (point - b)))
                    ) / 2,
                }.get(spec.variant, math.log1p(math.exp(-beta * m)))
            )  # fmt: skip
        eps = (1 - share_c) / 2 if spec.smoothing == "votes" else 0.0
        if spec.variant == "regression":
            errors = (sigmoid(beta * better) - share_c, sigmoid(beta * worse) - share_r)
            total += (errors[0] ** 2 + errors[1] ** 2) / 2
        else:
            total += (1 - eps) * both[0] + eps * both[1]
        total -= spec.nll * c / n_c
    return total


@given(data=st.data())
def test_every_variant_and_its_slopes_against_plain_floats(data: st.DataObject) -> None:
    nats, length = st.floats(-30, 0), st.integers(1, 9)
    votes = st.sampled_from([(1.0, 0.0), (2 / 3, 1 / 3), (2 / 3, 0.0), (0.5, 0.25)])
    drawn: list[Drawn] = [
        (*values, *data.draw(votes))  # type: ignore[misc]
        for values in data.draw(
            st.lists(st.tuples(nats, nats, nats, nats, length, length), min_size=1, max_size=4)
        )
    ]
    spec = DpoSpec(
        variant=data.draw(st.sampled_from(VARIANTS)),
        beta=0.3,
        smoothing=data.draw(st.sampled_from(["none", "votes"])),
        nll=data.draw(st.sampled_from([0.0, 0.7])),
        desirable=1.5,
        undesirable=0.5,
        gamma=0.4,
    )
    pairs = [
        replace(
            PAIR, chosen_ids=(1,) * n_c, rejected_ids=(2,) * n_r, ref_chosen=x, ref_rejected=y,
            chosen_share=share_c, rejected_share=share_r,
        )
        for _, _, x, y, n_c, n_r, share_c, share_r in drawn
    ]  # fmt: skip
    chosen = torch.tensor([d[0] for d in drawn], dtype=torch.float64).requires_grad_()
    rejected = torch.tensor([d[1] for d in drawn], dtype=torch.float64).requires_grad_()
    term = replay_dpo(chosen, rejected, pairs, spec)
    values = [v for c, r, x, y, *_ in drawn for v in (c - x, r - y)]
    point = max(0.0, sum(values) / len(values))
    assert term.total.item() == pytest.approx(expected(drawn, spec, point), abs=1e-9)
    assert term.total.dtype == torch.float64
    slopes = torch.autograd.grad(term.total, (chosen, rejected))
    for side in (0, 1):
        for i, one in enumerate(drawn):
            ends = []
            for h in (1e-5, -1e-5):
                moved = (*one[:side], one[side] + h, *one[side + 1 :])
                ends.append(expected([*drawn[:i], moved, *drawn[i + 1 :]], spec, point))
            slope = (ends[0] - ends[1]) / 2e-5
            assert slopes[side][i].item() == pytest.approx(slope, abs=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_takes_every_variant_in_any_micro_batches(llama: Twin, variant: str) -> None:
    """kto's reference point is that of all pairs, whatever bounds a forward."""
    batch = scene(llama, bank_of(llama))
    pairs = [replace(p, chosen_share=2 / 3, rejected_share=1 / 3) for p in batch.pairs]
    objective = changed(
        EpisodesObjective(w_doc=0.0, beta=1.0), dpo=DpoSpec(variant=variant, nll=0.1)
    )
    whole, parts = (
        do(llama, replace(batch, pairs=pairs), objective, micro_tokens=micro) for micro in (None, 2)
    )
    terms = [done.result.terms["replay_dpo"] for done in (whole, parts)]
    assert terms[0]["count"] == terms[1]["count"] == 2
    assert terms[1] == pytest.approx(terms[0], abs=1e-5)
    assert whole.gradient is not None
    assert parts.gradient is not None
    torch.testing.assert_close(parts.gradient, whole.gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
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
        {"variant": "orpo"},
        {"beta": 0.0},
        {"gamma": -0.1},
        {"desirable": 0.0},
        {"smoothing": "half"},
        {"nll": -0.1},
        {"reference": "first_use", "max_reference_age": -1},
        {"max_reference_age": 3},
    ],
)
def test_what_cannot_be_computed_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=list(wrong)[-1]):
        DpoSpec(**wrong)


@pytest.mark.parametrize("shares", [(-0.1, 0.0), (1.1, 0.0), (0.7, 0.4), (0.5, -0.1)])
def test_shares_of_votes_are_shares(shares: tuple[float, float]) -> None:
    with pytest.raises(DataError, match="shares are >= 0"):
        replace(PAIR, chosen_share=shares[0], rejected_share=shares[1])
