"""Advantages: the values of the objectives' table, and what a group's rewards cannot change."""

from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.episodes.losses.advantages import (
    group_advantages,
    overlong_penalty,
    varying_groups,
)
from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec

BASELINES = get_args(GrpoSpec.model_fields["baseline"].annotation)
GLOBAL = ("reinforce_pp", "reinforce_pp_baseline")
OF_GROUPS = [baseline for baseline in BASELINES if baseline not in GLOBAL]


@pytest.mark.parametrize(
    ("baseline", "expected"),
    [
        # mean .25, standard deviation .5: .75 / .5001 and -.25 / .5001
        ("grpo", [1.4997, -0.4999, -0.4999, -0.4999]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),  # the others' means: 0, then 1/3
        # mean .25, standard deviation with n sqrt(3)/4 = .43301: .75 / .43311 and -.25 / .43311
        ("reinforce_pp", [1.7317, -0.5772, -0.5772, -0.5772]),
        ("reinforce_pp_baseline", [1.7317, -0.5772, -0.5772, -0.5772]),
    ],
)
def test_one_of_four(baseline: str, expected: list[float]) -> None:
    found = group_advantages([1.0, 0.0, 0.0, 0.0], ["g"] * 4, baseline)
    assert found == pytest.approx(expected, abs=5e-5)


def test_two_tasks_compared_with_all_rewards() -> None:
    """Rewards 1, 0 | 3, 0: mean 1, deviation sqrt(1.5) = 1.22474; within the groups +-.5 and
    +-1.5, deviation sqrt(1.25) = 1.11803."""
    rewards, groups = [1.0, 0.0, 3.0, 0.0], ["a", "a", "b", "b"]
    found = group_advantages(rewards, groups, "reinforce_pp")
    assert found == pytest.approx([0.0, -0.81643, 1.63286, -0.81643], abs=5e-5)
    found = group_advantages(rewards, groups, "reinforce_pp_baseline")
    assert found == pytest.approx([0.44717, -0.44717, 1.34152, -1.34152], abs=5e-5)


def test_a_task_that_is_always_solved_is_compared_with_the_others() -> None:
    """Rewards 1, 1 | 0, 0: +-1 over .5001 by the global mean; 0 by the group's."""
    rewards, groups = [1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b"]
    expected = [0.9998, 0.9998, -0.9998, -0.9998]
    assert group_advantages(rewards, groups, "reinforce_pp") == pytest.approx(expected)
    assert group_advantages(rewards, groups, "reinforce_pp_baseline") == [0.0] * 4
    for baseline in GLOBAL:
        assert group_advantages([0.1] * 3, ["a", "a", "b"], baseline) == [0.0] * 3


@pytest.mark.parametrize("baseline", OF_GROUPS)
def test_a_group_of_one_or_of_equals_has_nothing_to_compare(baseline: str) -> None:
    # .1 three times has a mean of .10000000000000002 by some summations: still exactly 0
    rewards = [5.0, 0.1, 0.1, 0.1]
    assert group_advantages(rewards, ["one", "b", "b", "b"], baseline) == [0.0] * 4


@pytest.mark.parametrize("baseline", OF_GROUPS)
def test_episodes_without_reward_are_neither_trained_nor_compared_with(baseline: str) -> None:
    found = group_advantages([None, 1.0, None, 0.0, None], ["g", "g", "g", "g", "h"], baseline)
    pair = group_advantages([1.0, 0.0], ["g", "g"], baseline)
    assert found == [None, pair[0], None, pair[1], None]


@pytest.mark.parametrize("baseline", BASELINES)
def test_nothing_to_compare_is_no_error(baseline: str) -> None:
    assert group_advantages([None, 3.0], ["g", "g"], baseline) == [None, 0.0]
    assert group_advantages([None], ["g"], baseline) == [None]
    assert group_advantages([], [], baseline) == []
    found = group_advantages([None, 1.0, None, 0.0], ["g"] * 4, baseline)
    pair = group_advantages([1.0, 0.0], ["g", "g"], baseline)
    assert found == [None, pair[0], None, pair[1]]


@given(data=st.data())
def test_only_the_group_matters(data: st.DataObject) -> None:
    """Other groups, the order, and a bonus for everybody change nothing; a group sums to 0."""
    group = st.lists(st.integers(-5, 5).map(float), min_size=1, max_size=6)
    rewards = data.draw(group)
    others = data.draw(group)
    baseline = data.draw(st.sampled_from(OF_GROUPS))
    bonus = data.draw(st.integers(-9, 9))
    alone = group_advantages(rewards, ["g"] * len(rewards), baseline)
    mixed = [(r + bonus, "g", i) for i, r in enumerate(rewards)] + [(r, "h", -1) for r in others]
    mixed = data.draw(st.permutations(mixed))
    found = group_advantages([r for r, *_ in mixed], [g for _, g, _ in mixed], baseline)
    by_index = {i: a for (_, _, i), a in zip(mixed, found, strict=True) if i >= 0}
    assert [by_index[i] for i in range(len(rewards))] == pytest.approx(alone, abs=1e-9)
    assert sum(a for a in alone if a is not None) == pytest.approx(0, abs=1e-9)


def test_groups_whose_rewards_vary() -> None:
    rewards, groups = [1.0, 0.0, 0.3, 0.3, 5.0], ["a", "a", "b", "b", "c"]
    assert varying_groups(rewards, groups) == {"a"}
    assert varying_groups([], []) == set()


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (11, 0.0), (12, 0.0), (13, -0.25), (14, -0.5), (16, -1.0), (20, -1.0)],
)
def test_the_last_tokens_before_the_limit_cost_reward(length: int, penalty: float) -> None:
    """A limit of 16 tokens with a buffer of 4: nothing up to 12."""
    assert overlong_penalty(length, 16, 4) == penalty
