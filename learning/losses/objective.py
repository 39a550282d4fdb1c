"""The combined objective: which channels, what they weigh, and each one's term.

    total = w_doc * doc_kl  +  w_rl * grpo  +  alpha * sdpo  +  beta * replay_dpo

A channel of weight 0 is left out: not packed, not checked, not computed; the step is then bit for
bit the step without it. A channel without data contributes 0 and no gradient.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from learning.batch import Batch, Places
from learning.batching import token_logprobs
from learning.losses.advantages import group_advantages
from learning.losses.doc_kl import DocKL, doc_kl_count, doc_kl_tokens
from learning.losses.dpo import DPO, is_stale, replay_dpo, summed_by_pair
from learning.losses.grpo import GRPO, distilled, grpo, grpo_count
from learning.losses.sdpo import SDPO, alpha_at, sdpo_term, sdpo_tokens
from learning.losses.terms import Term
from learning.projection import Projection
from learning.teacher_logprobs import Teacher
from protocols.channels import RLSample, hinted
from protocols.errors import DataError, SpecError, StaleTokenError
from protocols.types import Sample

CHANNELS = ("doc_kl", "grpo", "sdpo", "replay_dpo")


@dataclass(frozen=True)
class Objective:
    """Weights and forms of the channels. `alpha` is reached after `alpha_warmup_steps`."""

    w_doc: float = 1.0
    w_rl: float = 0.0
    alpha: float = 0.0
    beta: float = 0.0
    alpha_warmup_steps: int = 0
    doc: DocKL = field(default_factory=DocKL)
    rl: GRPO = field(default_factory=GRPO)
    sdpo: SDPO = field(default_factory=SDPO)
    replay: DPO = field(default_factory=DPO)

    def __post_init__(self) -> None:
        weights = (self.w_doc, self.w_rl, self.alpha, self.beta)
        if any(w < 0 or not math.isfinite(w) for w in weights) or self.alpha_warmup_steps < 0:
            raise SpecError(
                "w_doc, w_rl, alpha, beta and alpha_warmup_steps must be finite and >= 0: got "
                f"{weights}, {self.alpha_warmup_steps}; 0 leaves a channel out"
            )

    @property
    def weights(self) -> dict[str, float]:
        return dict(zip(CHANNELS, (self.w_doc, self.w_rl, self.alpha, self.beta), strict=True))

    def at(self, step: int) -> Objective:
        """The objective of 0-based `step`, its schedule resolved."""
        alpha = alpha_at(step, self.alpha, self.alpha_warmup_steps)
        return replace(self, alpha=alpha, alpha_warmup_steps=0)


@dataclass(frozen=True)
class Work:
    """What a step works on: the batch of the channels that weigh something.

    `advantages` by the id of each rewarded episode; `excluded` episodes have no reward or no token
    of their own; `counts` are the channels' denominators over the whole batch.
    """

    batch: Batch
    advantages: Mapping[str, float]
    excluded: int
    counts: Mapping[str, int]


def prepare(batch: Batch, objective: Objective, version: int) -> Work:
    """Leave out what weighs nothing, compare rewards, count denominators: before any forward.

    Raises DataError for a batch that does not fit together, StaleTokenError for references or
    episodes of another version that came without the log-probabilities this needs.
    """
    batch = _weighing(batch, objective)
    _check_shapes(batch, objective)
    advantages = _advantages(batch.rl, objective) if objective.w_rl else {}
    excluded = len(batch.rl) - len(advantages) if objective.w_rl else 0
    batch = _only(batch, advantages.keys() | {item.sample for item in batch.sdpo})
    _check_versions(batch, objective, advantages, version)
    lengths = [sum(r.trained) for r in batch.rl if r.sample.id in advantages]
    counts = {
        "doc_kl": doc_kl_count(batch.doc_teacher, objective.doc) if batch.doc_teacher else 0,
        "grpo": grpo_count(lengths, objective.rl),
        "sdpo": sum(item.tokens for item in batch.sdpo),
        "replay_dpo": len(batch.pairs),
    }
    return Work(batch, advantages, excluded, counts)


def channel_terms(
    tokens: Projection,
    targets: Tensor,
    where: Places,
    part: Batch,
    work: Work,
    objective: Objective,
) -> dict[str, Term]:
    """Each channel's term over one micro-batch `part` of `work`; a channel without data has none.

    `tokens` are the N whose logits, with gradient, and targets [N] `where` speaks of. Of logits
    nothing is kept but a few numbers a token.
    """
    terms: dict[str, Term] = {}
    if part.doc:
        teacher = part.doc_teacher
        assert teacher is not None

        def distance(logits: Tensor, of: slice) -> tuple[Tensor, ...]:
            return (doc_kl_tokens(logits, teacher.rows(of), objective.doc),)

        (kl,) = tokens.read(slice(0, where.doc), distance)
        terms["doc_kl"] = Term(kl.sum(), doc_kl_count(teacher, objective.doc), where.doc)
    if part.rl or part.pairs:
        # Of the tokens after the documents'; `policy` and `turns` count from the first of all.
        rest = targets[where.doc :]
        (logprobs,) = tokens.read(
            slice(where.doc, None), lambda logits, of: (token_logprobs(logits, rest[of]),)
        )
    if where.lengths:
        pi = logprobs[where.policy - where.doc]
        old = _old(pi, part.old, where.policy_in_rl)
        episodes = [r for r in part.rl if r.sample.id in work.advantages]
        advantages = pi.new_tensor(
            [work.advantages[r.sample.id] for r in episodes for own in r.trained if own]
        )
        if objective.rl.distill:
            assert part.distill is not None
            distilling = part.distill[where.policy_in_rl].to(pi)
            advantages = distilled(advantages, old, distilling, objective.rl.distill)
        terms["grpo"] = grpo(
            pi,
            old,
            advantages,
            where.lengths,
            objective.rl,
            sampler=pi.new_tensor(_sampler_logprobs(episodes)),
            ref=None if part.ref is None else part.ref[where.policy_in_rl].to(pi),
        )
    if part.sdpo:
        hinted_teacher, turns = part.sdpo_teacher, targets[where.turns]
        assert hinted_teacher is not None
        sampled = _old(logprobs[where.turns - where.doc], part.old, where.turns_in_rl)

        def hints(logits: Tensor, of: slice) -> tuple[Tensor, ...]:
            return sdpo_tokens(
                logits, hinted_teacher.rows(of), turns[of], sampled[of], objective.sdpo
            )

        terms["sdpo"] = sdpo_term(tokens.read(where.turns, hints), objective.sdpo)
    if part.pairs:
        chosen, rejected = summed_by_pair(logprobs[where.pairs - where.doc :], part.pairs)
        terms["replay_dpo"] = replay_dpo(chosen, rejected, part.pairs, objective.replay)
    return terms


def _weighing(batch: Batch, objective: Objective) -> Batch:
    """The batch without the data of channels that weigh nothing."""
    if not objective.w_doc:
        batch = replace(batch, doc=(), doc_trained=None, doc_teacher=None)
    if not objective.alpha:
        batch = replace(batch, sdpo=(), sdpo_teacher=None)
    if not objective.beta:
        batch = replace(batch, pairs=())
    if not objective.w_rl:
        batch = replace(batch, ref=None, distill=None)
        if not objective.alpha:
            batch = replace(batch, rl=(), old=None)
    return batch


def _only(batch: Batch, episodes: Collection[str]) -> Batch:
    rl = [i for i, r in enumerate(batch.rl) if r.sample.id in episodes]
    if len(rl) == len(batch.rl):
        return batch
    return batch.take(range(len(batch.doc)), rl, range(len(batch.pairs)))


def _advantages(rl: Sequence[RLSample], objective: Objective) -> dict[str, float]:
    """By id, of the episodes that can be trained on: with a reward and a token of their own."""
    judged = [r for r in rl if r.reward is not None and any(r.trained)]
    values = group_advantages(
        [r.reward for r in judged], [r.group for r in judged], objective.rl.baseline
    )
    return {r.sample.id: a for r, a in zip(judged, values, strict=True) if a is not None}


def _check_shapes(batch: Batch, objective: Objective) -> None:
    """That everything needed is there, and speaks of as many tokens as its samples have."""
    twice = [i for i, n in Counter(r.sample.id for r in batch.rl).items() if n > 1]
    if twice:
        raise DataError(f"the batch has several RL samples of the ids {twice}; ids must be unique")
    turns = hinted(batch.sdpo, batch.rl)
    episodes = [r.sample for r in batch.rl]
    marked = sum(sum(marks) for marks in batch.doc_marks)
    for name, given, tokens, needed in (
        ("doc_teacher", batch.doc_teacher, marked, True),
        ("sdpo_teacher", batch.sdpo_teacher, _tokens_of(turns), True),
        ("old", batch.old, _tokens_of(episodes), False),
        ("ref", batch.ref, _tokens_of(episodes), objective.w_rl > 0 and objective.rl.kl > 0),
        (
            "distill",
            batch.distill,
            _tokens_of(episodes),
            objective.w_rl > 0 and objective.rl.distill > 0,
        ),
    ):
        if given is None:
            if needed and tokens:
                raise DataError(
                    f"the batch has no {name}, which this objective needs; score its samples with "
                    "learning.scoring, or set the weight that asks for it to 0"
                )
            continue
        held = given.tokens if isinstance(given, Teacher) else len(given)
        if held != tokens:
            raise DataError(
                f"batch.{name} speaks of {held} tokens and its samples have {tokens}; give one "
                "entry for each response token, those not trained on included (of a hinted turn: "
                "for each of its tokens)"
            )


def _tokens_of(samples: Sequence[Sample]) -> int:
    return sum(len(s.response_ids) for s in samples)


def _check_versions(
    batch: Batch, objective: Objective, advantages: Mapping[str, float], version: int
) -> None:
    """That ratios and references are of the versions they are taken for."""
    sampled = {item.sample for item in batch.sdpo} if objective.sdpo.variant == "sampled" else set()
    for r in batch.rl:
        if r.sample.id in advantages or r.sample.id in sampled:
            _check_policy(r, batch.old is not None, version)
    for p in batch.pairs:
        if is_stale(p, version, objective.replay.max_reference_age):
            raise StaleTokenError(
                f"preference pair {p.id} has a reference of version {p.ref_version}, and version "
                f"{version} is being trained with replay.max_reference_age "
                f"{objective.replay.max_reference_age}: recompute it with "
                "learning.scoring.with_references; nothing was trained on it"
            )


def _check_policy(r: RLSample, has_old: bool, version: int) -> None:
    s, drawn = r.sample, r.sampling
    if (drawn.temperature, drawn.top_p, drawn.top_k) != (1.0, 1.0, 0):
        raise DataError(
            f"RL sample {s.id} was drawn at temperature {drawn.temperature}, top_p {drawn.top_p}, "
            f"top_k {drawn.top_k}, which biases the policy's ratio; sample at 1, 1 and 0"
        )
    own = {v for v, trained in zip(s.versions, r.trained, strict=True) if trained}
    if not has_old and own != {version}:
        raise StaleTokenError(
            f"RL sample {s.id} was sampled by versions {sorted(own)}, and version {version} is "
            "being trained: give batch.old, the log-probabilities under the versions that sampled "
            "it (learning.scoring.response_logprobs); nothing was trained on it"
        )


def _old(pi: Tensor, old: Tensor | None, at: Tensor) -> Tensor:
    """With one update for each rollout the policy that sampled is the policy itself."""
    return pi.detach() if old is None else old[at].to(pi)


def _sampler_logprobs(episodes: list[RLSample]) -> list[float]:
    return [
        logprob
        for r in episodes
        for logprob, own in zip(r.sample.sampler_logprobs, r.trained, strict=True)
        if own
    ]
