"""Compute grpo: the clipped policy gradient of rewarded episodes, with a choice of denominators.

Per trained token t, `pi` is the student's log-probability of the token, `old` the trainer's under
the version that sampled it, `sampler` the inference engine's own, `ref` a frozen reference's:

    r_t    = exp(pi - old); "sequence": exp of the mean over the episode's tokens, one for each
    loss_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t)
             for A_t < 0 at most -dual_clip * A_t
    w_t    = exp(old - sampler), no gradient: corrects the sampler's deviation from the trainer
    k3_t   = exp(d) - d - 1,  d = ref - pi

    sum over t of  w_t * loss_t + kl * k3_t,  divided by

    grpo       each token by its episode's length, then by episodes
    dr_grpo    episodes * max_length
    bnpo       tokens of this trainer's batch
    dapo       tokens of all trainers' batches

A trainer's batch is all its micro-batches on all its ranks; with one trainer, bnpo and dapo are
equal.

`old` is one of

    trainer    the trainer's own, computed before the first of a rollout's updates; with one update
               it is `pi` without its gradient: the ratio is 1, its gradient is not
    sampler    the sampler's record; w_t is 1 then, for the ratio has the sampler's deviation in it

A group whose rewards are all equal has advantages of 0. It is dropped with its tokens, or it would
weaken the others through the denominator (`zero_variance`; Yu et al. 2025, dynamic sampling).

An episode with a turn at its limit of tokens may be left out (`overlong: filter`; its reward is
then compared with none), or lose reward over the last tokens before the limit (`shape`). Whether a
group varies is a matter of the rewards before that, as in DAPO.

With the sampler's record its deviation alone moves tokens out of the clip range and out of the
gradient, which costs accuracy against truncated weights (Yao et al. 2025). `trainer` is the
default, and clips what the updates moved.

Sources: Shao et al. 2024 (GRPO); Yu et al. 2025 (DAPO: clip-higher, token mean); Liu et al. 2025
(Dr. GRPO); Zheng et al. 2025 (sequence ratio); Ye et al. 2020 (dual clip); Schulman 2020 (k3);
Yao et al. 2025 (the sampler off-policy: truncated importance weights).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from cartridge_forge.learning.batch import ChannelTokens, ChunkedLogits, Item, MicroBatch
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, check_scores, counted
from cartridge_forge.plugins.episodes.losses.advantages import (
    compared,
    group_advantages,
    shaped,
    varying,
)
from cartridge_forge.plugins.episodes.spec.objective import (
    EpisodesObjective,
    GrpoSpec,
    MismatchSpec,
)
from cartridge_forge.plugins.objectives.policy_scores import check_policy
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import PolicySample, Sample, TrainBatch

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: larger ratios carry no information


@dataclass(frozen=True)
class GRPO(LossChannel):
    """Train on episodes with a reward, compared within their group.

    `batch.scores` may have "old", "ref" and "document": log-probabilities of *all* response tokens
    of all episodes in order (those not trained on are never read), under the version that sampled
    them (by default the one being trained), the reference, and the model with the document.
    """

    weight: float
    spec: GrpoSpec
    name: ClassVar[str] = "grpo"
    reads: ClassVar[str] = "rl"

    @classmethod
    def from_spec(cls, objective: ObjectiveSpec, loss: LossSpec) -> GRPO:
        ours = EpisodesObjective.of(objective)
        return cls(ours.w_rl, ours.grpo)

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return episodes_of(batch)

    def items(self, batch: TrainBatch) -> list[Item]:
        return [
            (i, [t for t, is_trained in enumerate(batch.rl[i].trained) if is_trained])
            for i in self._advantages(batch)
        ]

    def check(self, batch: TrainBatch, version: int) -> None:
        tokens = check_episodes(batch)
        check_scores(batch, "ref", tokens, needed=self._reference == "ref")
        check_scores(batch, "document", tokens, needed=self.spec.asks_document)
        for i in self._advantages(batch):
            check_policy(batch, batch.rl[i], version, recorded=self._corrects)

    def references(self, updates: int) -> frozenset[str]:
        old = {"old"} if self.spec.old == "trainer" and updates > 1 else set()
        return frozenset(old | ({"ref"} if self._reference == "ref" else set()))

    def of_rollout(self, batch: TrainBatch) -> dict[str, Any]:
        advantages = self._advantages(batch).items()
        return {"advantages": {batch.rl[i].sample.id: value for i, value in advantages}}

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        episodes = [batch.rl[i] for i in self._advantages(batch)]
        return counted(
            (r.sample.cartridge, grpo_count([sum(r.trained)], self.spec)) for r in episodes
        )

    def facts(self, batch: TrainBatch) -> dict[str, float]:
        rl, spec = batch.rl, self.spec
        judged = compared(rl, spec)
        facts: dict[str, float] = {"excluded": len(rl) - len(judged)}
        if spec.overlong == "filter":
            facts["overlong"] = sum(r.truncated and r.reward is not None for r in rl)
        elif spec.overlong == "shape":
            facts["overlong"] = sum(shaped(rl[i], spec) != rl[i].reward for i in judged)
        if spec.zero_variance == "drop":
            facts["dropped_groups"] = sum(
                len({rl[i].group for i in indices if i in set(judged)} - varying(rl, spec))
                for indices in by_cartridge(rl)
            )
        return facts

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        batch, tokens = micro.batch, micro.tokens[self.name]
        pi = logits.logprobs(tokens.at, tokens.first)
        sampler = pi.new_tensor(
            [
                batch.rl[i].sample.sampler_logprobs[t]
                for i, positions in tokens.items
                for t in positions
            ]
        )
        old = sampler if self.spec.old == "sampler" else old_logprobs(pi, batch, tokens)
        value_of = self._advantages(batch)
        advantages = pi.new_tensor(
            [value_of[i] for i, positions in tokens.items for _ in positions]
        )
        facts = {}
        if self.spec.distill:
            document = batch.scores["document"][tokens.inside].to(pi)
            advantages = distilled(advantages, old, document, self.spec.distill)
            facts["distilled"] = (old - document).sum()
        ref = batch.scores.get(self._reference)
        term = grpo(
            pi,
            old,
            advantages,
            [len(positions) for _, positions in tokens.items],
            self.spec,
            sampler=sampler,
            ref=None if ref is None else ref[tokens.inside].to(pi),
        )
        return replace(term, facts={**term.facts, **facts}, owners=tokens.owners)

    @property
    def _corrects(self) -> bool:
        """Return whether the sampler's record weighs tokens of an older version."""
        return self.spec.old == "sampler" or self.spec.mismatch is not None

    @property
    def _reference(self) -> str:
        """Return the name of the reference's scores; "" without a KL to one."""
        if not self.spec.kl:
            return ""
        return "document" if self.spec.kl_reference == "document" else "ref"

    def _advantages(self, batch: TrainBatch) -> dict[int, float]:
        """Return the advantages of the whole batch by index, for episodes that bear the loss. Those
        of a part of a rollout are the whole rollout's."""
        if (stored := batch.scores.get("advantages")) is not None:
            ids = [r.sample.id for r in batch.rl]
            return {i: stored[name] for i, name in enumerate(ids) if name in stored}
        advantages: dict[int, float] = {}
        for indices in by_cartridge(batch.rl):
            rl = [batch.rl[i] for i in indices]
            judged = compared(rl, self.spec)
            if self.spec.zero_variance == "drop":
                groups = varying(rl, self.spec)
                judged = [n for n in judged if rl[n].group in groups]
            values = group_advantages(
                [shaped(rl[n], self.spec) for n in judged],
                [rl[n].group for n in judged],
                self.spec.baseline,
            )
            advantages |= {
                indices[n]: a for n, a in zip(judged, values, strict=True) if a is not None
            }
        return dict(sorted(advantages.items()))


def by_cartridge(rl: Sequence[PolicySample]) -> list[list[int]]:
    """Return the indices of the episodes that train each cartridge: rewards are compared within a
    cartridge only."""
    groups: dict[str, list[int]] = {}
    for i, r in enumerate(rl):
        groups.setdefault(r.sample.cartridge, []).append(i)
    return list(groups.values())


def episodes_of(batch: TrainBatch) -> list[tuple[Sample, ...]]:
    """Return the set "rl": the batch's episodes."""
    return [(r.sample,) for r in batch.rl]


def check_episodes(batch: TrainBatch) -> int:
    """Return the number of response tokens of all episodes. Raises DataError for two episodes of
    one id, or `old` scores over other tokens."""
    twice = [i for i, n in Counter(r.sample.id for r in batch.rl).items() if n > 1]
    if twice:
        raise DataError(f"the batch has several RL samples of the ids {twice}; ids must be unique")
    tokens = sum(len(r.trained) for r in batch.rl)
    check_scores(batch, "old", tokens, needed=False)
    return tokens


def old_logprobs(pi: Tensor, batch: TrainBatch, tokens: ChannelTokens) -> Tensor:
    """Return the trainer's log-probabilities under the version that sampled, without gradient. With
    one update per rollout they are those of `pi`."""
    old = batch.scores.get("old")
    return pi.detach() if old is None else old[tokens.inside].to(pi)


def grpo(
    pi: Tensor,
    old: Tensor,
    advantages: Tensor,
    lengths: Sequence[int],
    spec: GrpoSpec,
    *,
    sampler: Tensor | None = None,
    ref: Tensor | None = None,
) -> LossTerm:
    """Return the summed loss of B episodes of `lengths` trained tokens, laid end to end: all are
    [N].

    `pi` has gradient, `old`, `sampler` and `ref` none. A mismatch correction needs `sampler`,
    kl > 0 needs `ref`. Facts are sums over tokens: ratio; clipped, and of it at the lower and at
    the upper bound; approx_kl, the k3 estimate of KL(old || pi); k3, the mismatch weight and the
    share that it corrected.
    """
    log_ratio = pi - old
    moved = k3_divergence(old, pi.detach())
    if spec.ratio == "sequence":
        log_ratio = per_episode(log_ratio, lengths, torch.mean)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1 - spec.clip_low, 1 + spec.clip_high)
    gain, bounded_gain = ratio * advantages, bounded * advantages
    loss = -torch.minimum(gain, bounded_gain)
    if spec.dual_clip is not None:
        worst = -spec.dual_clip * advantages
        loss = torch.where(advantages < 0, torch.minimum(loss, worst), loss)
    clipped = bounded_gain < gain
    facts = {
        "ratio": ratio,
        "clipped": clipped.float(),
        "clipped_low": (clipped & (advantages < 0)).float(),
        "clipped_high": (clipped & (advantages > 0)).float(),
        "approx_kl": moved,
    }
    if spec.mismatch is not None:
        assert sampler is not None, "a mismatch correction needs the sampler's log-probabilities"
        weight, corrected = mismatch_weight(old, sampler, lengths, spec.mismatch)
        loss = weight * loss
        facts |= {"mismatch_weight": weight, "mismatch_corrected": corrected}
    if spec.kl > 0:
        assert ref is not None, "a KL to the reference needs its log-probabilities"
        k3 = k3_divergence(pi, ref)
        loss = loss + spec.kl * k3
        facts["k3"] = k3
    if spec.reduction == "grpo":
        counts = torch.tensor(list(lengths), dtype=torch.long)
        loss = loss / counts.repeat_interleave(counts).to(loss)
    return LossTerm(
        losses=loss,
        count=grpo_count(lengths, spec),
        items=len(pi),
        facts={name: values.detach().sum() for name, values in facts.items()},
    )


def grpo_count(lengths: Sequence[int], spec: GrpoSpec) -> int:
    """Return grpo's denominator under `spec.reduction`, from the episodes' numbers of trained
    tokens. It does not depend on the student and adds up over micro-batches."""
    if spec.reduction == "grpo":
        return len(lengths)
    if spec.reduction == "dr_grpo":
        assert spec.max_length is not None
        return len(lengths) * spec.max_length
    return sum(lengths)


def k3_divergence(pi: Tensor, ref: Tensor) -> Tensor:
    """Return exp(d) - d - 1 per token with d = ref - pi: never negative, and unbiased for
    KL(pi || ref) under pi's own samples."""
    d = ref - pi
    return d.exp() - d - 1


def mismatch_weight(
    old: Tensor, sampler: Tensor, lengths: Sequence[int], spec: MismatchSpec
) -> tuple[Tensor, Tensor]:
    """Return (weight, 1.0 where it was truncated or masked), [N] each, without gradient."""
    log_weight = (old - sampler).detach()
    if spec.level == "sequence":
        log_weight = per_episode(log_weight, lengths, torch.sum)
    weight = log_weight.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    out = weight > spec.high
    if spec.mode == "truncate":
        return weight.clamp(max=spec.high), out.float()
    if spec.mode == "band":
        out = out | (weight < spec.low)
    return weight.masked_fill(out, 0.0), out.float()


def distilled(advantages: Tensor, student: Tensor, teacher: Tensor, price: float) -> Tensor:
    """Return A - price * (student - teacher), [N], without gradient: on-policy distillation as a
    reward. `student` and `teacher` are log-probabilities of the sampled tokens; their difference is
    the one-sample estimate of the reverse KL."""
    return advantages - price * (student - teacher).detach()


def per_episode(
    values: Tensor, lengths: Sequence[int], reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return `reduce` over each episode's tokens, repeated for every token: [N] to [N]."""
    if not lengths:
        return values
    parts = values.split_with_sizes(list(lengths))
    return torch.cat([reduce(part).expand(len(part)) for part in parts])
