"""Compute doc_kl: the divergence of the student's next-token distribution from the document
teacher's.

The teacher gives all logits of a response token, or its top k log-probabilities. The direction and
the form for top k are options (notation: S student, T teacher, V vocabulary):

    forward         KL(T || S), mass-covering: the cartridge paper's direction
    reverse         KL(S || T), mode-seeking: on-policy distillation's usual direction
    jsd             beta * KL(T || M) + (1 - beta) * KL(S || M),  M = (1 - beta) * S + beta * T
    cross_entropy   -sum_T p_T log q_S: forward KL plus the teacher's entropy

    tail            k entries and one bucket for the rest, on both sides; equals full at k = V and
                    does not jump as k changes
    renormalised    both sides renormalised over the teacher's k entries
    pairs           neither: sum over (token, k) pairs / number of pairs (HazyResearch/cartridges,
                    for comparison with published curves; cross_entropy only)

Sources: Eyuboglu et al. 2025 (cartridges); Agarwal et al. 2024 (generalised JSD, on-policy).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from cartridge_forge.learning.batch import ChunkedLogits, Item, MicroBatch, token_values
from cartridge_forge.learning.losses.channel import LossChannel, LossTerm, check_scores, counted
from cartridge_forge.learning.teacher import TeacherDistribution
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.sections import REFUSED, LossSpec, ObjectiveSpec
from cartridge_forge.protocols.step import OFFLINE_VERSION, Sample, TrainBatch

IMPOSSIBLE = float("-inf")  # the log-probability of an outcome that a side rules out
UNRESOLVED = 1e-7  # float32 log-probabilities cannot tell a smaller rest of the mass from rounding
SMALL_TAIL = 1e-6  # below it, 1 - (the rest) is off by more than a tenth


@dataclass(frozen=True)
class DocKL(LossChannel):
    """Distil the document teacher into samples that the student reads over their cartridge.
    `batch.scores["doc_teacher"]` is a TeacherDistribution over every token that bears a loss."""

    weight: float
    spec: LossSpec
    name: ClassVar[str] = "doc_kl"
    reads: ClassVar[str] = "doc"

    @classmethod
    def from_spec(cls, objective: ObjectiveSpec, loss: LossSpec) -> DocKL:
        return cls(objective.w_doc, loss)

    def samples(self, batch: TrainBatch) -> list[tuple[Sample, ...]]:
        return [(sample,) for sample in batch.doc]

    def items(self, batch: TrainBatch) -> list[Item]:
        return [
            (i, [t for t, bears in enumerate(marks) if bears])
            for i, marks in enumerate(batch.doc_marks)
        ]

    def check(self, batch: TrainBatch, version: int) -> None:
        check_scores(batch, "doc_teacher", sum(map(sum, batch.doc_marks)), needed=True)

    def denominators(self, batch: TrainBatch) -> dict[str, int]:
        teacher = batch.scores.get("doc_teacher")
        if teacher is None:
            return {}
        per_token = _counted_as(teacher, self.spec)
        marks = zip(batch.doc, batch.doc_marks, strict=True)
        return counted((sample.cartridge, sum(trained) * per_token) for sample, trained in marks)

    def term(self, logits: ChunkedLogits, micro: MicroBatch) -> LossTerm:
        tokens = micro.tokens[self.name]
        teacher = micro.batch.scores["doc_teacher"].rows(tokens.rows)
        kl, *masses = logits.read(
            tokens.at, lambda chunk, span: _read(chunk, teacher.rows(span), self.spec)
        )
        targets = logits.targets[tokens.at]  # [n]
        texts = [
            (len(trained), not s.verified and any(v != OFFLINE_VERSION for v in s.versions))
            for s, trained in ((micro.batch.doc[i], trained) for i, trained in tokens.items)
        ]
        tokens_behind = refused_before(texts, teacher, targets)
        return LossTerm(
            kl, teacher.tokens * _counted_as(teacher, self.spec), len(kl), owners=tokens.owners,
            facts={"student_mass": masses[0].sum()} if masses else {},
            shares={"after_refusal": (torch.tensor(tokens_behind), torch.tensor(len(kl)))},
        )  # fmt: skip


def _read(
    student: Tensor, teacher: TeacherDistribution, spec: LossSpec
) -> tuple[Tensor] | tuple[Tensor, Tensor]:
    """Return each token's part of the loss, [n]; for a divergence that weighs by the student, with
    a teacher that tells its top k, also the student's mass on these entries, [n]."""
    loss = doc_kl_tokens(student, teacher, spec)
    if teacher.indices is None or spec.direction not in ("reverse", "jsd"):
        return (loss,)
    return loss, student_mass(student, teacher)


@torch.no_grad()
def student_mass(student: Tensor, teacher: TeacherDistribution) -> Tensor:
    """Return the student's probability [N] of the entries that a top-k teacher tells, from logits
    [N, V]."""
    assert teacher.indices is not None
    logits = student.float()
    entries = logits.gather(-1, teacher.indices.long().to(logits.device))  # [N, k]
    return (entries - logits.logsumexp(-1, keepdim=True)).exp().sum(-1)


@torch.no_grad()
def refused_before(
    texts: Sequence[tuple[int, bool]], teacher: TeacherDistribution, targets: Tensor
) -> int:
    """Return how many of the tokens `targets` [N] lie behind a token of their own text that the
    teacher gives less than REFUSED. `texts` are the texts' numbers of tokens, in order, and whether
    the student wrote them alone; others have no such token, because a refused one was replaced.

    A token outside the teacher's top k has at most the probability of the last entry, and at most
    what all entries leave. With k of 20 that is always less than REFUSED; with a smaller k a token
    counts as refused where that is certain.
    """
    if not any(by_student for _, by_student in texts):
        return 0
    refused = (_most_logprobs(teacher, targets) < math.log(REFUSED)).tolist()
    total = begin = 0
    for count, by_student in texts:
        marks = refused[begin : begin + count]
        if by_student and True in marks:
            total += count - 1 - marks.index(True)
        begin += count
    return total


def _most_logprobs(teacher: TeacherDistribution, targets: Tensor) -> Tensor:
    """Return the largest log-probability [N] that the targets can have by what the teacher told:
    their own, but for those outside its top k."""
    if teacher.sampled is not None:
        return teacher.sampled
    if teacher.logits is not None:
        return token_values(teacher.logits.float(), targets)
    assert teacher.indices is not None
    assert teacher.logprobs is not None
    logprobs = teacher.logprobs.float()
    match = teacher.indices == targets.to(teacher.indices.device)[:, None]  # [N, k]
    least = torch.minimum(logprobs.amin(-1), log_tail(logprobs)[:, 0])
    return torch.where(match.any(-1), logprobs.masked_fill(~match, IMPOSSIBLE).amax(-1), least)


def doc_batch(samples: Sequence[Sample], teacher: TeacherDistribution) -> TrainBatch:
    """Return a batch of document distillation alone: samples, and the teacher's distribution at
    each of their response tokens."""
    return TrainBatch(doc=tuple(samples), scores={"doc_teacher": teacher})


def doc_kl(student: Tensor, teacher: TeacherDistribution, spec: LossSpec) -> tuple[Tensor, int]:
    """Return (summed loss, denominator); the mean is sum / max(count, 1). student [N, V] are logits
    with gradient. The denominator is tokens, or (token, k) pairs for the form "pairs". N = 0 gives
    (0, 0) with a graph, never NaN."""
    count = teacher.tokens * _counted_as(teacher, spec)
    return doc_kl_tokens(student, teacher, spec).sum(), count


def doc_kl_tokens(student: Tensor, teacher: TeacherDistribution, spec: LossSpec) -> Tensor:
    """Return each token's part of the summed loss, [N]."""
    log_s, log_t = aligned(student, teacher, spec.form, spec.temperature)
    return divergence(log_s, log_t, spec)


def _counted_as(teacher: TeacherDistribution, spec: LossSpec) -> int:
    """Return what a token counts in the denominator: 1, or its k of the form "pairs"."""
    if spec.form == "pairs" and teacher.logprobs is not None:
        return teacher.logprobs.shape[-1]
    return 1


def aligned(
    student: Tensor, teacher: TeacherDistribution, form: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities [N, K] of student and teacher over the same K outcomes. K is V for a
    teacher with all its logits; for a top-k teacher `form` decides it. student [N, V] are logits
    with gradient. Raises SpecError for a temperature other than 1 with a top-k teacher."""
    if student.shape[0] != teacher.tokens:
        raise AssertionError(
            f"student has {student.shape[0]} response tokens and teacher {teacher.tokens}: "
            "they must be the same tokens in the same order"
        )
    teacher = teacher.to(student.device)
    if teacher.logits is not None:
        log_s = F.log_softmax(student.float() / temperature, dim=-1)
        return log_s, F.log_softmax(teacher.logits.float() / temperature, dim=-1)
    if temperature != 1.0:
        raise SpecError(
            "loss.temperature other than 1 needs the teacher's whole distribution: "
            "set teacher.top_k: full"
        )
    assert teacher.indices is not None
    assert teacher.logprobs is not None
    indices = teacher.indices.long()
    logits = student.float()
    top_s: Tensor = _LogProbsAt.apply(logits, indices)  # type: ignore[no-untyped-call]  # torch's
    top_t = teacher.logprobs.float()
    if form == "tail" and top_t.shape[-1] < logits.shape[-1]:
        resolved = _log_mass(top_t) < -UNRESOLVED
        top_s = torch.cat([top_s, _student_tail(logits, top_s, indices, resolved)], dim=-1)
        top_t = torch.cat([top_t, log_tail(top_t)], dim=-1)
    elif form == "renormalised":
        top_s = top_s.log_softmax(-1)
        top_t = top_t.log_softmax(-1)
    return top_s, top_t


def divergence(log_s: Tensor, log_t: Tensor, spec: LossSpec) -> Tensor:
    """Return the divergence chosen by `spec` per token [N], from log-probabilities [N, K]."""
    if spec.direction == "forward":
        return _kl_entries(log_t, log_s).sum(-1)
    if spec.direction == "reverse":
        return _kl_entries(log_s, log_t).sum(-1)
    if spec.direction == "cross_entropy":
        return -(log_t.exp() * torch.where(log_t == IMPOSSIBLE, 0.0, log_s)).sum(-1)
    assert spec.beta is not None, "the section's own rule"
    return jensen_shannon(log_s, log_t, spec.beta)


def jensen_shannon(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return the generalised JSD per token [N]. By convention beta = 0 and 1 are the forward and
    reverse KL (J itself tends to 0 at both ends, J / beta to the forward KL as beta -> 0)."""
    parts = [weight * entries.sum(-1) for weight, entries in _parts(log_s, log_t, beta)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _parts(log_s: Tensor, log_t: Tensor, beta: float) -> list[tuple[float, Tensor]]:
    """Return the KLs that make up the JSD: (weight, entries [N, K])."""
    if beta == 0:
        return [(1.0, _kl_entries(log_t, log_s))]
    if beta == 1:
        return [(1.0, _kl_entries(log_s, log_t))]
    log_m = _log_mixture(log_s, log_t, beta)
    return [(beta, _kl_entries(log_t, log_m)), (1 - beta, _kl_entries(log_s, log_m))]


def _log_mixture(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Return log M, finite where both sides are impossible: torch's logsumexp of -inf alone has
    NaN as its gradient, and no entry reads M there."""
    weights = torch.tensor([1 - beta, beta], device=log_s.device).log()
    log_t = torch.where((log_s == IMPOSSIBLE) & (log_t == IMPOSSIBLE), 0.0, log_t)
    return torch.logsumexp(torch.stack([log_s + weights[0], log_t + weights[1]]), dim=0)


def log_tail(top: Tensor) -> Tensor:
    """Return the log of the mass outside the given entries, [N, 1], at least log(UNRESOLVED):
    float32 log-probabilities do not say how much less than that is left."""
    return torch.log(-torch.expm1(_log_mass(top).clamp(max=-UNRESOLVED)))


class _LogProbsAt(torch.autograd.Function):
    """Compute the log-probabilities [N, k] at `indices` [N, k] from logits [N, V]. Those of the
    whole vocabulary, and their gradient, are never formed beside the logits' own."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, indices: Tensor) -> Tensor:
        total = logits.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, indices, total)
        return logits.gather(-1, indices) - total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits, indices, total = ctx.saved_tensors
        by_logit = (logits - total).exp_().mul_(-grad.sum(-1, keepdim=True))
        return by_logit.scatter_add_(-1, indices, grad), None


def _student_tail(logits: Tensor, top_s: Tensor, indices: Tensor, resolved: Tensor) -> Tensor:
    """Return the log of the student's mass outside `indices` [N, k], with its gradient, [N, 1].

    A tail of less than SMALL_TAIL is summed over the vocabulary, since 1 - (the rest) has hardly a
    digit left. Where the teacher's tail is not `resolved` [N, 1] either, both count as UNRESOLVED.
    """
    small = _log_mass(top_s.detach()) > -SMALL_TAIL
    (rows,) = (small & resolved).squeeze(-1).nonzero(as_tuple=True)
    if not len(rows):
        return log_tail(top_s)
    tail = F.log_softmax(logits[rows], dim=-1).scatter(-1, indices[rows], IMPOSSIBLE)
    return log_tail(top_s).index_put((rows,), _log_mass(tail))


def _log_mass(logprobs: Tensor) -> Tensor:
    """Return the log of each row's sum, [N, 1]; -inf without gradient where every entry is -inf,
    for which the gradient of torch's logsumexp is NaN."""
    empty = (logprobs == IMPOSSIBLE).all(-1, keepdim=True)
    total = torch.logsumexp(logprobs.masked_fill(empty, 0.0), dim=-1, keepdim=True)
    return total.masked_fill(empty, IMPOSSIBLE)


def _kl_entries(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return each outcome's part of KL(p || q); 0 log 0 = 0, also where log_p is -inf. The
    difference is masked before it is multiplied: 0 * -inf has NaN as its gradient."""
    return log_p.exp() * torch.where(log_p == IMPOSSIBLE, 0.0, log_p - log_q)
