"""Compute sdpo: distil a failed turn from the same model with a hint in its context.

Student and teacher score the same tokens of the turn; the teacher's context has the hint. There are
two variants (S student, T teacher, at one token of the turn):

    jsd       the generalised JSD of `learning.losses.doc_kl` over the vocabulary (beta 0 and 1 are
              the forward and reverse KL)
    sampled   sg(log S - log T) * log S on the sampled token, times min(exp(log S - old), 2) without
              gradient: the reverse KL's gradient, estimated from the sample alone

Both sum over tokens; the denominator is the number of tokens. Temperature divides both sides'
logits, with no T^2 factor.

Two options bound a token's jsd, and neither is on by default:

    token_bound   weighs the whole token by min(1, token_bound / its jsd), a weight without
                  gradient: a shorter step in the same direction
    token_clip    clamps each vocabulary entry's part to at most token_clip. A clamped entry has no
                  gradient, and at a wrong call the clamped entries are the right and the wrong
                  token: the entries that are left train away from the hint

With either, `gradient_removed` reports the sum over tokens and logits of |d jsd/dz - d loss/dz|
divided by that of |d jsd/dz|: 0 where nothing is taken away, above 1 only where the gradient is
turned round.

Sources: Huebotter et al. 2026 (SDPO, sampled variant); Zhao et al. 2026 (OPSD: hinted self-teacher,
token clip); Agarwal et al. 2024 (generalised JSD).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from cartridge_forge.learning.batch import ChunkedLogits, Item, MicroBatch, token_logprobs
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, check_scores, counted
from cartridge_forge.learning.losses.doc_kl import _kl_entries, _log_mixture, _parts, aligned
from cartridge_forge.learning.teacher import TeacherDistribution
from cartridge_forge.plugins.episodes.losses.grpo import (
    LOG_RATIO_BOUND,
    check_episodes,
    episodes_of,
    old_logprobs,
)
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.plugins.objectives.policy_scores import check_policy
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.sections import LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import Sample, TrainBatch, hinted

RATIO_CAP = 2.0


@dataclass(frozen=True)
class SDPO(LossChannel):
    """Distil hinted turns of the batch's episodes from the same model, which has read the hint.
    `batch.scores["sdpo_teacher"]` is a TeacherDistribution over every token of every turn."""

    weight: float
    spec: SdpoSpec
    warmup_steps: int = 0
    name: ClassVar[str] = "sdpo"
    reads: ClassVar[str] = "rl"

    @classmethod
    def from_spec(cls, objective: ObjectiveSpec, loss: LossSpec) -> SDPO:
        ours = EpisodesObjective.of(objective)
        return cls(ours.alpha, ours.sdpo, ours.alpha_warmup_steps)

    def at(self, step: int) -> SDPO:
        weight = alpha_at(step, self.weight, self.warmup_steps)
        return replace(self, weight=weight, warmup_steps=0)

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return episodes_of(batch)

    def items(self, batch: TrainBatch) -> list[Item]:
        episodes = {r.sample.id: i for i, r in enumerate(batch.rl)}
        return [(episodes[turn.sample], range(turn.start, turn.stop)) for turn in batch.turns]

    def check(self, batch: TrainBatch, version: int) -> None:
        check_episodes(batch)
        tokens = sum(len(s.response_ids) for s in hinted(batch.turns, batch.rl))
        check_scores(batch, "sdpo_teacher", tokens, needed=True)
        if self.spec.variant == "sampled":
            for i in sorted({i for i, _ in self.items(batch)}):
                check_policy(batch, batch.rl[i], version)

    def references(self, updates: int) -> frozenset[str]:
        return frozenset({"old"} if self.spec.variant == "sampled" and updates > 1 else ())

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        learns = {r.sample.id: r.sample.cartridge for r in batch.rl}
        return counted((learns[turn.sample], turn.tokens) for turn in batch.turns)

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        tokens = micro.tokens[self.name]
        teacher = micro.batch.scores["sdpo_teacher"].rows(tokens.rows)
        turns = logits.targets[tokens.at]
        sampled = old_logprobs(logits.logprobs(tokens.at, tokens.first), micro.batch, tokens)

        def hints(chunk: Tensor, rows: slice) -> tuple[Tensor, ...]:
            return sdpo_tokens(chunk, teacher.rows(rows), turns[rows], sampled[rows], self.spec)

        term = sdpo_term(logits.read(tokens.at, hints), self.spec)
        return replace(term, owners=tokens.owners)


def sdpo_tokens(
    student: Tensor, teacher: TeacherDistribution, targets: Tensor, old: Tensor, spec: SdpoSpec
) -> tuple[Tensor, ...]:
    """Return each hinted token's loss, [N], and two numbers of each for the report, if there are
    any, [N] each: of "sampled" log S - log T and the ratio, of a bounded or clipped "jsd" the
    gradient taken away and the whole gradient, both as sums over logits of absolute values.

    student [N, V] are logits with gradient, `targets` [N] the sampled tokens, `old` [N] their
    log-probability under the version that sampled them, which only "sampled" reads. "sampled" needs
    all the teacher's logits, for its probability of the sampled token.
    """
    if spec.variant == "sampled":
        return _sampled(student, teacher, targets, old)
    return _jsd(student, teacher, spec)


def sdpo_term(tokens: tuple[Tensor, ...], spec: SdpoSpec) -> LossTerm:
    """Sum what `sdpo_tokens` returned into a LossTerm."""
    loss, *values = tokens
    sums = [value.detach().sum() for value in values]
    if spec.variant == "sampled":
        difference, ratio = sums
        facts = {"difference": difference, "ratio": ratio}
        return LossTerm(loss, len(loss), len(loss), facts=facts)
    shares = {}
    if sums:
        removed, full = sums
        shares["gradient_removed"] = (removed, full)
    return LossTerm(loss, len(loss), len(loss), shares=shares)


def alpha_at(step: int, alpha: float, warmup_steps: int) -> float:
    """Return the channel's weight at 0-based `step`: linear from 0 over `warmup_steps`, then
    constant."""
    return alpha * min(1.0, step / warmup_steps) if warmup_steps else alpha


def _jsd(student: Tensor, teacher: TeacherDistribution, spec: SdpoSpec) -> tuple[Tensor, ...]:
    log_s, log_t = aligned(student, teacher, "tail", spec.temperature)
    entries = jensen_shannon_entries(log_s, log_t, spec.beta)
    if spec.token_bound is not None:
        loss = entries.sum(-1)
        weight = spec.token_bound / loss.detach().clamp(min=spec.token_bound)
        slopes = jensen_shannon_slopes(log_s, log_t, spec.beta)
        full = _logit_gradient(log_s, slopes, spec.temperature)
        return weight * loss, (1 - weight) * full, full
    if spec.token_clip is not None:
        clamped = entries.detach() > spec.token_clip
        slopes = jensen_shannon_slopes(log_s, log_t, spec.beta)
        full = _logit_gradient(log_s, slopes, spec.temperature)
        removed = _logit_gradient(log_s, slopes * clamped, spec.temperature)
        return entries.clamp(max=spec.token_clip).sum(-1), removed, full
    return (entries.sum(-1),)


def _logit_gradient(log_s: Tensor, slopes: Tensor, temperature: float) -> Tensor:
    """Return sum over logits z of |d/dz|, [N], of a sum of outcomes with d outcome/d log S =
    `slopes` [N, K]. A tail's logits share its sign, so its entry holds their sum."""
    log_s = log_s.detach()
    gradient = slopes - log_s.exp() * slopes.sum(-1, keepdim=True)
    return gradient.abs().sum(-1) / temperature


def _sampled(
    student: Tensor, teacher: TeacherDistribution, targets: Tensor, old: Tensor
) -> tuple[Tensor, ...]:
    if teacher.logits is None:
        raise SpecError(
            "sdpo.variant sampled needs the teacher's whole distribution, for a sampled token may "
            "lie outside its top k: set teacher.top_k: full"
        )
    assert student.shape[0] == teacher.tokens, (student.shape, teacher.tokens)
    log_s = token_logprobs(student.float(), targets)
    log_t = token_logprobs(teacher.logits.to(student.device).float(), targets)
    lag = (log_s.detach() - old).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = lag.exp().clamp(max=RATIO_CAP)
    difference = (log_s - log_t).detach()
    return ratio * difference * log_s, difference, ratio


def jensen_shannon_entries(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return each outcome's part of the generalised JSD, [N, K]; an entry may be negative."""
    parts = [weight * entries for weight, entries in _parts(log_s, log_t, beta)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def jensen_shannon_slopes(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return the derivative of each of `jensen_shannon_entries` by its own log S, [N, K], without
    gradient."""
    log_s, log_t = log_s.detach(), log_t.detach()
    if beta == 0:
        return -log_t.exp()
    if beta == 1:
        return _kl_entries(log_s, log_t) + log_s.exp()
    return (1 - beta) * _kl_entries(log_s, _log_mixture(log_s, log_t, beta))
