"""Advantages: what an episode was worth beside the other episodes of its task.

    grpo      (r - mean) / (std + 1e-4), the standard deviation with n - 1 (Shao et al. 2024)
    dr_grpo   r - mean: no weight to tasks that are nearly always or never solved (Liu et al. 2025)
    rloo      r - mean of the others (Ahmadian et al. 2024)

An episode alone in its group, or one of a group whose rewards are all equal, has nothing to be
compared with: its advantage is 0. One without a reward is neither trained nor compared with.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

EPSILON = 1e-4  # keeps the scale of a group whose rewards hardly differ finite


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], baseline: str = "grpo"
) -> list[float | None]:
    """The advantage of each episode within its group, in order; None where the reward is None."""
    found: list[float | None] = [None] * len(rewards)
    members: dict[str, list[int]] = {}
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None:
            members.setdefault(group, []).append(i)
    for indices in members.values():
        values = [float(r) for i in indices if (r := rewards[i]) is not None]
        for i, advantage in zip(indices, _within(values, baseline), strict=True):
            found[i] = advantage
    return found


def _within(rewards: list[float], baseline: str) -> list[float]:
    if min(rewards) == max(rewards):  # also where rounding would leave a tiny difference
        return [0.0] * len(rewards)
    mean, n = fmean(rewards), len(rewards)
    if baseline == "dr_grpo":
        return [r - mean for r in rewards]
    if baseline == "rloo":
        return [(r - mean) * n / (n - 1) for r in rewards]
    assert baseline == "grpo", baseline
    scale = stdev(rewards) + EPSILON
    return [(r - mean) / scale for r in rewards]
