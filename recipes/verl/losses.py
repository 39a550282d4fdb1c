"""Register our advantages and our clipped policy loss with veRL, under names of their own.

    algorithm.adv_estimator                         forge_grpo, forge_dr_grpo, forge_rloo,
                                                    forge_reinforce_pp, forge_reinforce_pp_baseline
    actor_rollout_ref.actor.policy_loss.loss_mode   forge_token, forge_sequence

The formulas are those of `plugins.episodes.losses.advantages` and `plugins.episodes.losses.grpo`.
The denominator is veRL's (`loss_agg_mode`), for it knows the other ranks and micro-batches:
`token-mean` is our `dapo`, `seq-mean-token-mean` our `grpo`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss

from cartridge_forge.plugins.episodes.losses.advantages import group_advantages
from cartridge_forge.plugins.episodes.losses.grpo import grpo
from cartridge_forge.plugins.episodes.spec.objective import GrpoSpec

BASELINES: tuple[str, ...] = get_args(GrpoSpec.model_fields["baseline"].annotation)
Ratio = Literal["token", "sequence"]
RATIOS: tuple[Ratio, ...] = get_args(GrpoSpec.model_fields["ratio"].annotation)
DUAL_CLIP = 3.0  # veRL's own default of clip_ratio_c


def outcome_advantages(
    baseline: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Sequence[Any],
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [B, T], equal: an episode's on each token of its mask. A row's
    reward is the sum of its token rewards [B, T]; rows with equal `index` are one group."""
    rewards = token_level_rewards.sum(dim=-1).tolist()
    advantages = group_advantages(rewards, [str(one) for one in index], baseline)
    values = token_level_rewards.new_tensor([0.0 if one is None else one for one in advantages])
    spread = values[:, None] * response_mask
    return spread, spread


def clipped_policy_loss(
    ratio: Ratio,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss, a scalar with graph, and metrics, from [B, T] each. `config` is veRL's
    ActorConfig, with the clip range and what it knows of the whole batch."""
    mask = response_mask.bool()
    low, high = config.clip_ratio_low, config.clip_ratio_high
    spec = GrpoSpec(
        ratio=ratio,
        clip_low=config.clip_ratio if low is None else low,
        clip_high=config.clip_ratio if high is None else high,
        dual_clip=config.get("clip_ratio_c", DUAL_CLIP),
        mismatch=None,  # veRL's is in the weights
    )
    lengths = mask.sum(dim=1).tolist()
    term = grpo(
        log_prob[mask], old_log_prob[mask], advantages[mask], [n for n in lengths if n], spec
    )
    losses = torch.zeros_like(log_prob).masked_scatter(mask, term.losses)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    facts = {name: (value / max(term.items, 1)).item() for name, value in term.facts.items()}
    return loss, {
        "actor/pg_clipfrac": facts["clipped"],
        "actor/ppo_kl": facts["approx_kl"],
        "actor/ratio": facts["ratio"],
    }


for _name in BASELINES:
    register_adv_est(f"forge_{_name}")(partial(outcome_advantages, _name))
for _ratio in RATIOS:
    register_policy_loss(f"forge_{_ratio}")(partial(clipped_policy_loss, _ratio))
