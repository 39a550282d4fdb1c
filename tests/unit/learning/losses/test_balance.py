"""The balance of channels: its coefficients by hand, and the gradient that a step then takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import ALL, bank_of, changed, do, of_cartridge, progress_of, scene
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec
from cartridge_forge.plugins.objectives.balance import GradientBalance
from cartridge_forge.protocols.step import TrainBatch

CHANNELS = tuple(EpisodesObjective().weights)

if TYPE_CHECKING:
    from twins import Twin

    from cartridge_forge.learning.cartridge import CartridgeBank
    from cartridge_forge.learning.trainer_state import CartridgeProgress

WEIGHTS = dict(zip(CHANNELS, ("w_doc", "w_rl", "alpha", "beta"), strict=True))
NONE = EpisodesObjective(w_doc=0.0)


def measured(**norms: float) -> GradientBalance:
    balance = GradientBalance()
    balance.add(norms)
    return balance


def test_two_channels_by_hand() -> None:
    """Norms 0.1 and 4 at weights 1 and 0.5: scale (0.1 + 2) / 1.5 = 1.4, coefficients 14 and
    0.175, sizes 1.4 and 0.7 (two thirds and a third), 2.1 in all as in the plain sum."""
    found = measured(grpo=0.1, replay_dpo=4.0).coefficients({"grpo": 1.0, "replay_dpo": 0.5})
    assert found == pytest.approx({"grpo": 14.0, "replay_dpo": 0.175})


def test_the_mean_of_norms_is_corrected_for_its_start() -> None:
    """After 2 and 5 at decay 0.9: (0.9 * 0.2 + 0.5) / (1 - 0.81) = 0.68 / 0.19."""
    balance = measured(grpo=2.0)
    assert balance.means() == pytest.approx({"grpo": 2.0})
    balance.add({"grpo": 5.0})
    assert balance.means() == pytest.approx({"grpo": 0.68 / 0.19})


@pytest.mark.parametrize("silent", [0.0, math.nan, math.inf, None])
def test_a_silent_channel_keeps_its_mean_and_lets_no_other_grow(silent: float | None) -> None:
    weights = {"grpo": 1.0, "replay_dpo": 0.5}
    balance = measured(grpo=0.1, replay_dpo=4.0)
    before = balance.coefficients(weights)
    balance.add({} if silent is None else {"grpo": silent})
    assert balance.coefficients(weights) == before


@pytest.mark.parametrize("weight", [0.3, 1.0, 0.1 + 0.2])
def test_a_channel_alone_has_its_weight_exactly(weight: float) -> None:
    assert measured(grpo=0.07).coefficients({"grpo": weight}) == {"grpo": weight}
    # Of two, one of which never had a gradient, both have theirs.
    weights = {"grpo": weight, "sdpo": 0.7}
    assert measured(grpo=0.07, sdpo=0.0).coefficients(weights) == weights


def test_a_coefficient_is_bounded() -> None:
    """The scale is near 500: 5e5 times the weight of one, half the weight of the other."""
    balance = GradientBalance(bound=100.0)
    balance.add({"grpo": 1e-3, "replay_dpo": 1e3})
    found = balance.coefficients({"grpo": 2.0, "replay_dpo": 2.0})
    assert found == pytest.approx({"grpo": 200.0, "replay_dpo": 1.000001})


def test_when_norms_are_measured() -> None:
    balance = GradientBalance(every=4)
    assert balance.is_due(1, ["grpo"])
    balance.add({"grpo": 1.0})
    assert [v for v in range(1, 10) if balance.is_due(v, ["grpo"])] == [4, 8]
    assert balance.is_due(5, ["grpo", "replay_dpo"])
    assert not balance.is_due(5, [])


@given(
    st.lists(
        st.tuples(st.floats(0.01, 10), st.floats(1e-3, 1e3)), min_size=2, max_size=4
    )
)  # fmt: skip
def test_shares_follow_the_weights_and_the_whole_stays(drawn: list[tuple[float, float]]) -> None:
    weights = {str(i): weight for i, (weight, _) in enumerate(drawn)}
    norms = {str(i): norm for i, (_, norm) in enumerate(drawn)}
    balance = GradientBalance(bound=1e9)
    balance.add(norms)
    sizes = {n: c * norms[n] for n, c in balance.coefficients(weights).items()}
    plain = sum(weights[n] * norms[n] for n in norms)
    assert sum(sizes.values()) == pytest.approx(plain)
    total = sum(weights.values())
    assert {n: s / plain for n, s in sizes.items()} == pytest.approx(
        {n: w / total for n, w in weights.items()}
    )


def test_the_state_crosses_json_to_the_bit() -> None:
    balance = measured(grpo=0.1, sdpo=1 / 3)
    balance.add({"grpo": 1e-7})
    again = GradientBalance()
    again.restore(json.loads(json.dumps(balance.state())))
    assert again.means() == balance.means()
    again.restore({})
    assert again.means() == {}


def balanced(
    twin: Twin, every: int = 1
) -> tuple[GradientBalance, dict[str, CartridgeProgress], CartridgeBank]:
    """The balance of a bank's one cartridge."""
    bank = bank_of(twin, "a")
    balance, progress = GradientBalance(every), progress_of(bank)
    progress["a"].balance = balance
    return balance, progress, bank


@pytest.mark.parametrize("micro_tokens", [None, 24])
def test_a_step_takes_every_channel_at_its_coefficient(
    llama: Twin, micro_tokens: int | None
) -> None:
    batch = of_cartridge(scene(llama, bank_of(llama)), "a")
    alone, norms = {}, {}
    for name, weight in WEIGHTS.items():
        gradient = do(
            llama, batch, changed(NONE, **{weight: 1.0}), bank=bank_of(llama, "a")
        ).gradient
        assert gradient is not None
        alone[name], norms[name] = gradient.double(), gradient.double().norm().item()
    weights = {name: getattr(ALL, weight) for name, weight in WEIGHTS.items()}
    scale = sum(weights[n] * norms[n] for n in norms) / sum(weights.values())
    balance, progress, bank = balanced(llama)
    done = do(llama, batch, ALL, micro_tokens=micro_tokens, bank=bank, progress=progress)
    assert done.gradient is not None
    assert balance.means() == pytest.approx(norms, rel=1e-4)
    expected = torch.zeros_like(alone["grpo"])
    for name, term in done.result.terms.items():
        coefficient = weights[name] * scale / norms[name]
        expected += coefficient * alone[name]
        assert term["coefficient"] == pytest.approx(coefficient, rel=1e-4)
        assert term["grad_norm"] == pytest.approx(norms[name], rel=1e-4)
        assert term["mean_grad_norm"] == pytest.approx(term["grad_norm"])
        assert term["share"] == pytest.approx(weights[name] / sum(weights.values()), rel=1e-4)
        assert term["weight"] == weights[name]
    size = expected.abs().max().item()
    torch.testing.assert_close(done.gradient.double(), expected, rtol=0, atol=1e-4 * size)
    assert done.result.cosines == {}


def test_between_two_measurements_the_coefficients_stay(llama: Twin) -> None:
    batch = of_cartridge(scene(llama, bank_of(llama), version=1), "a")
    balance, progress, bank = balanced(llama, every=2)
    progress["a"].steps = 1
    balance.add(dict.fromkeys(CHANNELS, 1.0))
    balance.add({"replay_dpo": 3.0})
    expected = balance.coefficients({n: getattr(ALL, w) for n, w in WEIGHTS.items()})
    before = balance.state()
    done = do(llama, batch, ALL, version=1, bank=bank, progress=progress)
    assert balance.state() == before
    terms = done.result.terms
    assert {name: term["coefficient"] for name, term in terms.items()} == expected
    assert "grad_norm" not in terms["grpo"]
    _, again, bank = balanced(llama, every=2)
    again["a"].balance, again["a"].steps = balance, 1
    compared = do(llama, batch, ALL, version=1, bank=bank, progress=again, compare_gradients=True)
    assert balance.state() == before
    assert len(compared.result.cosines) == 6
    assert torch.equal(compared.trained, done.trained)


def test_equal_rewards_leave_the_pairs_as_they_are(llama: Twin) -> None:
    """The policy has no gradient once every episode of a group ends alike; the pairs stay small."""
    batch = of_cartridge(scene(llama, bank_of(llama)), "a")
    keep = GrpoSpec(zero_variance="keep")
    objective = changed(ALL, w_doc=0.0, alpha=0.0, grpo=keep)
    balance, progress, bank = balanced(llama)
    first = do(llama, batch, objective, bank=bank, progress=progress).result.terms["replay_dpo"]
    _, progress, bank = balanced(llama)
    progress["a"].balance = balance
    alike = replace(batch, rl=[replace(r, reward=0.0, error_kind="") for r in batch.rl])
    done = do(llama, alike, objective, bank=bank, progress=progress).result.terms
    assert done["grpo"]["grad_norm"] == 0.0
    assert done["replay_dpo"]["coefficient"] == pytest.approx(first["coefficient"])
    assert done["replay_dpo"]["share"] == 1.0


def test_a_batch_without_data_trains_nothing(llama: Twin) -> None:
    balance, progress, bank = balanced(llama)
    done = do(llama, TrainBatch(), ALL, bank=bank, progress=progress)
    assert done.gradient is None
    assert balance.means() == {}
    assert "mean_grad_norm" not in done.result.terms["grpo"]
