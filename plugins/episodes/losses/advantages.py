"""Compute advantages: the reward of an episode relative to other episodes.

    grpo      (r - mean) / (std + 1e-4), the standard deviation with n - 1 (Shao et al. 2024)
    dr_grpo   r - mean: no weight to tasks that are nearly always or never solved (Liu et al. 2025)
    rloo      r - mean of the others (Ahmadian et al. 2024)

    reinforce_pp            (r - Mean) / (Std + 1e-4) (REINFORCE++, Hu et al. 2025)
    reinforce_pp_baseline   (r - mean) / (Std + 1e-4), Std of these differences (the same authors'
                            variant with a group baseline)

mean and std are those of an episode's group, the episodes of one task; Mean and Std, the latter
with n, those of all episodes of the rollout. The advantage is 0 where all rewards compared are
equal: for an episode alone in its group too, but with reinforce_pp. An episode without a reward is
not trained on and enters no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, pstdev, stdev

from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec
from cartridge_forge.protocols.step import PolicySample

EPSILON = 1e-4  # keeps advantages finite in a group whose rewards hardly differ


def group_advantages(
    rewards: Sequence[float | None], groups: Sequence[str], baseline: str = "grpo"
) -> list[float | None]:
    """Return the advantage of each episode, in order; None where the reward is None."""
    if baseline == "reinforce_pp":  # one group of all
        return _normalised(group_advantages(rewards, [""] * len(rewards), "dr_grpo"))
    if baseline == "reinforce_pp_baseline":
        return _normalised(group_advantages(rewards, groups, "dr_grpo"))
    advantages: list[float | None] = [None] * len(rewards)
    members: dict[str, list[int]] = {}
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        if reward is not None:
            members.setdefault(group, []).append(i)
    for indices in members.values():
        values = [float(r) for i in indices if (r := rewards[i]) is not None]
        for i, advantage in zip(indices, _within(values, baseline), strict=True):
            advantages[i] = advantage
    return advantages


def compared(rl: Sequence[PolicySample], spec: GrpoSpec) -> list[int]:
    """Return the indices of the episodes whose rewards are compared: those with a reward and a
    trained token, and not cut short where these are filtered."""
    return [
        i for i, r in enumerate(rl)
        if r.reward is not None and any(r.trained)
        and not (r.truncated and spec.overlong == "filter")
    ]  # fmt: skip


def shaped(r: PolicySample, spec: GrpoSpec) -> float | None:
    """Return an episode's reward, less what its longest turn costs."""
    if r.reward is None or spec.overlong_buffer is None:
        return r.reward
    return r.reward + overlong_penalty(r.longest_turn, r.sampling.max_tokens, spec.overlong_buffer)


def varying(rl: Sequence[PolicySample], spec: GrpoSpec) -> set[str]:
    """Return the groups whose compared rewards are not all equal."""
    judged = [rl[i] for i in compared(rl, spec)]
    rewards = [r.reward for r in judged if r.reward is not None]
    return varying_groups(rewards, [r.group for r in judged])


def overlong_penalty(length: int, limit: int, buffer: int) -> float:
    """Return what a response of `length` tokens loses of its reward (Yu et al. 2025, soft overlong
    punishment): 0 up to `limit - buffer`, then linearly down to -1 at `limit`."""
    return -min(1.0, max(0, length - (limit - buffer)) / buffer)


def varying_groups(rewards: Sequence[float], groups: Sequence[str]) -> set[str]:
    """Return the groups whose rewards are not all equal: those that GRPO learns from."""
    of_group: dict[str, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        of_group.setdefault(group, set()).add(reward)
    return {group for group, values in of_group.items() if len(values) > 1}


def _normalised(centred: list[float | None]) -> list[float | None]:
    """Return the values, whose mean is 0, over their standard deviation."""
    values = [a for a in centred if a is not None]
    scale = pstdev(values, 0.0) + EPSILON if values else EPSILON
    return [None if a is None else a / scale for a in centred]


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
