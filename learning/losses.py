"""doc_kl: how far the student's next-token distribution is from the document teacher's.

Per response token the teacher gives either all logits or its top k log-probabilities; directions
and top-k forms are choices (notation: S student, T teacher, V vocabulary):

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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from protocols.channels import StoredScores
from protocols.errors import SpecError

DIRECTIONS = ("forward", "reverse", "jsd", "cross_entropy")
FORMS = ("tail", "renormalised", "pairs")


@dataclass(frozen=True)
class DocKL:
    """Which doc_kl to compute. `beta` is read by "jsd" alone, `form` by top-k teachers alone."""

    direction: str = "forward"
    beta: float = 0.5
    form: str = "tail"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.direction not in DIRECTIONS or self.form not in FORMS:
            raise SpecError(
                f"loss.direction must be one of {DIRECTIONS} and loss.form one of {FORMS}: "
                f"got {self.direction!r}, {self.form!r}"
            )
        if self.form == "pairs" and self.direction != "cross_entropy":
            raise SpecError(
                "loss.form 'pairs' exists for cross_entropy only (it is no divergence): "
                f"got direction {self.direction!r}; use form 'tail'"
            )


def doc_kl(student: Tensor, teacher: Teacher, spec: DocKL) -> tuple[Tensor, int]:
    """The summed loss and its own denominator: (sum, count); the mean is sum / max(count, 1).

    student [N, V] logits with gradient. The denominator is tokens, or (token, k) pairs for the
    form "pairs". N = 0 gives (0, 0) with a graph, never NaN.
    """
    return doc_kl_tokens(student, teacher, spec).sum(), doc_kl_count(teacher, spec)


def doc_kl_tokens(student: Tensor, teacher: Teacher, spec: DocKL) -> Tensor:
    """What each token adds to the summed loss, [N]."""
    log_s, log_t = aligned(student, teacher, spec.form, spec.temperature)
    return divergence(log_s, log_t, spec)


def doc_kl_count(teacher: Teacher, spec: DocKL) -> int:
    """doc_kl's denominator: known before the student has been asked."""
    if spec.form == "pairs" and teacher.logprobs is not None:
        return teacher.logprobs.numel()
    return teacher.tokens


def aligned(
    student: Tensor, teacher: Teacher, form: str, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N, K] of student and teacher over the same K outcomes.

    K is V for a teacher with all its logits; for a top-k one what `form` makes of its entries.
    student [N, V] logits with gradient. Raises SpecError for a temperature that a top-k teacher
    cannot follow.
    """
    if student.shape[0] != teacher.tokens:
        raise AssertionError(
            f"student has {student.shape[0]} response tokens and teacher {teacher.tokens}: "
            "they must be the same tokens in the same order"
        )
    teacher = teacher.to(student.device)
    log_s = F.log_softmax(student.float() / temperature, dim=-1)
    if teacher.logits is not None:
        return log_s, F.log_softmax(teacher.logits.float() / temperature, dim=-1)
    if temperature != 1.0:
        raise SpecError(
            "loss.temperature other than 1 needs the teacher's whole distribution: "
            "set teacher.top_k: full"
        )
    assert teacher.indices is not None
    assert teacher.logprobs is not None
    top_s = log_s.gather(-1, teacher.indices.long())
    top_t = teacher.logprobs.float()
    if form == "tail" and top_t.shape[-1] < log_s.shape[-1]:
        top_s = torch.cat([top_s, log_tail(top_s)], dim=-1)
        top_t = torch.cat([top_t, log_tail(top_t)], dim=-1)
    elif form == "renormalised":
        top_s = top_s.log_softmax(-1)
        top_t = top_t.log_softmax(-1)
    return top_s, top_t


@dataclass(frozen=True)
class Teacher:
    """The teacher's view of N response tokens: `logits` [N, V], or its top k
    (`indices`, `logprobs` [N, k], log-probabilities under the whole vocabulary)."""

    logits: Tensor | None = None
    indices: Tensor | None = None
    logprobs: Tensor | None = None

    @property
    def tokens(self) -> int:
        one = self.logits if self.logits is not None else self.logprobs
        assert one is not None
        return len(one)

    def rows(self, which: slice | Tensor) -> Teacher:
        """The teacher's view of some of the tokens: a slice, or indices [n]."""
        return self._each(lambda x: x[which])

    def to(self, device: torch.device) -> Teacher:
        """The same where the student is: scores come off the tensor plane on the host, and reach
        the device a chunk of tokens at a time."""
        return self._each(lambda x: x.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> Teacher:
        held = (self.logits, self.indices, self.logprobs)
        return Teacher(*(None if x is None else change(x) for x in held))


def of_stored(stored: StoredScores) -> Teacher:
    """The view of a sample's tokens that was kept when its text was written."""
    indices = torch.tensor(stored.ids, dtype=torch.int32)
    return Teacher(indices=indices, logprobs=torch.tensor(stored.logprobs))


def joined(parts: Sequence[tuple[Sequence[int], Teacher]], lengths: Sequence[int]) -> Teacher:
    """One view of all samples' tokens, in the samples' order, from views of some of them each.

    `lengths[i]` are the tokens of sample i; a part is the indices of its samples, in the order in
    which its teacher's rows lie: ((0, 2), T1), ((1,), T2).
    """
    if len(parts) == 1 and tuple(parts[0][0]) == tuple(range(len(lengths))):
        return parts[0][1]
    order = [i for samples, _ in parts for i in samples]
    assert sorted(order) == list(range(len(lengths))), "a sample is scored once"
    begins = dict(zip(order, accumulate((lengths[i] for i in order), initial=0), strict=False))
    rows = torch.tensor(
        [begins[i] + t for i, length in enumerate(lengths) for t in range(length)], dtype=torch.long
    )
    columns = zip(*((t.logits, t.indices, t.logprobs) for _, t in parts), strict=True)
    return Teacher(*(None if x[0] is None else torch.cat(x)[rows.to(x[0].device)] for x in columns))


def divergence(log_s: Tensor, log_t: Tensor, spec: DocKL) -> Tensor:
    """The chosen divergence per token [N], from log-probabilities [N, K]."""
    if spec.direction == "forward":
        return _kl(log_t, log_s)
    if spec.direction == "reverse":
        return _kl(log_s, log_t)
    if spec.direction == "cross_entropy":
        return -(log_t.exp() * log_s).sum(-1)
    return jensen_shannon(log_s, log_t, spec.beta)


def jensen_shannon(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """Generalised JSD per token [N]; beta = 0 and 1 are the forward and reverse KL by convention
    (J itself tends to 0 at both ends, J / beta to the forward KL as beta -> 0)."""
    parts = [weight * entries.sum(-1) for weight, entries in _parts(log_s, log_t, beta)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def jensen_shannon_entries(log_s: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """What each outcome contributes to the generalised JSD, [N, K]; an entry may be negative."""
    parts = [weight * entries for weight, entries in _parts(log_s, log_t, beta)]
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def _parts(log_s: Tensor, log_t: Tensor, beta: float) -> list[tuple[float, Tensor]]:
    """The KLs that make up the JSD: (weight, entries [N, K])."""
    if beta == 0:
        return [(1.0, _kl_entries(log_t, log_s))]
    if beta == 1:
        return [(1.0, _kl_entries(log_s, log_t))]
    weights = torch.tensor([1 - beta, beta], device=log_s.device).log()
    log_m = torch.logsumexp(torch.stack([log_s + weights[0], log_t + weights[1]]), dim=0)
    return [(beta, _kl_entries(log_t, log_m)), (1 - beta, _kl_entries(log_s, log_m))]


def log_tail(top: Tensor) -> Tensor:
    """Log of the mass outside the given entries, [N, 1]; bounded away from log 0 so that a top-k
    that holds everything has a finite tail and a finite gradient."""
    held = torch.logsumexp(top, dim=-1, keepdim=True).clamp(max=-1e-7)
    return torch.log(-torch.expm1(held))


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) per row."""
    return _kl_entries(log_p, log_q).sum(-1)


def _kl_entries(log_p: Tensor, log_q: Tensor) -> Tensor:
    """What each outcome contributes to KL(p || q); 0 log 0 = 0, also where log_p is -inf."""
    terms = log_p.exp() * (log_p - log_q)
    return torch.where(log_p == float("-inf"), torch.zeros_like(terms), terms)


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most likely tokens and their log-probabilities: ([N, k] int32, [N, k] float32)."""
    found = F.log_softmax(logits.float(), dim=-1).topk(min(k, logits.shape[-1]), dim=-1)
    return found.indices.int(), found.values
