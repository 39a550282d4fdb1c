"""Compact a document's KV to P entries in closed form, layer by layer, without training.

After Zweiger et al., "Fast KV Compaction via Attention Matching" (2026). Reference rows
(`plugins.library.reference_rows`) are read once by two readers side by side: the teacher, over the
whole document, and the student, over the entries that the layers below have been given. So layer l
is fitted to the queries, keys and values that the student has there. Of each KV head:

    keys      the P document keys whose attention weights have the largest root mean square
    mass      weights w_j >= 0 of the kept keys, so that sum_j w_j exp(q.k_j) is the document's mass
              for every query; their logarithms are the paper's biases
    folding   a cartridge has no field for a bias. There is a direction u with q.u = 1 for nearly
              all queries of a head, so the key k_j + log(w_j) u has the biased score
    values    least-squares fit of what is asked of the layer's attention: the teacher's output, and
              what the student's tokens lack of the teacher's so far (feedback), through the
              pseudo-inverse of the layer's output projection

A key is where a prompt over the cartridge sees it: the student's rows begin at position P, and the
document's keys are moved by P - T.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.attention import (
    AttentionOptions,
    Layout,
    attend,
    layout_of,
    over_own,
    window_mask,
)
from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decoder import KeyFrequencies, LanguageModel
from cartridge_forge.learning.ranks import concurrently, most_beside
from cartridge_forge.plugins.library.reference_rows import (
    NO_STUDY,
    ReferenceRow,
    StudyPrompts,
    reference_rows,
)
from cartridge_forge.protocols.step import advance_preparation

SCORE_NUMBERS = 2**24  # of scores in memory together: 64 MiB
UPDATES = 30  # of the weights of mass
LEAST_BIAS, MOST_BIAS = -4.0, 4.0
DIRECTION_RIDGE = 1e-3  # times the mean diagonal of the queries' squares
FEEDBACK_RIDGE = 0.3  # times the mean diagonal of the output projection's squares
VALUE_RIDGE = 0.03  # times the mean diagonal of the value fit's squares; less is undone by Adam
FAR = (0, 256, 1024)  # positions further back, from which a bias is to be the same


@dataclass(frozen=True)
class HeadQueries:
    """Hold n queries of the heads that share one KV head: `queries` [n, D] times the layer's scale;
    `own_sums` [n] the log of their sums of exponentials over their own rows, `own_outputs` [n, D]
    what they read there; `targets` [n, D] what they are to read of row and cartridge together.
    Behind the document they stand at `positions` [n], behind the cartridge at `kept_positions` [n];
    `options` tells how far back they see, and the cap.
    """

    queries: Tensor
    own_sums: Tensor
    own_outputs: Tensor
    targets: Tensor
    positions: Tensor
    kept_positions: Tensor
    options: AttentionOptions


def scored(head: HeadQueries, keys: Tensor, span: slice, positions: Tensor) -> Tensor:
    """Return the scores [m, K] of the queries `span`, at their `positions` [n], on keys [K, D], in
    float32 or wider."""
    queries, options = head.queries[span], head.options
    scores = queries @ keys.T.to(queries)
    if options.cap is not None:
        scores.div_(options.cap).tanh_().mul_(options.cap)
    mask = window_mask(positions[span], len(keys), options, scores.dtype)
    return scores if mask is None else scores + mask[0, 0]


def attended(
    head: HeadQueries, span: slice, scores: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention weights [m, K] of the queries `span` by their `scores` [m, K], which
    become them, on values [K, D], and what the queries read [m, D] there and in their rows."""
    own_sums = head.own_sums[span]
    total = torch.logaddexp(scores.logsumexp(-1), own_sums)
    shares = scores.sub_(total[:, None]).exp_()
    of_row = (own_sums - total).exp()[:, None]
    return shares, shares @ values + of_row * head.own_outputs[span]


def over_rows(
    q: Tensor, k: Tensor, v: Tensor, layout: Layout, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """Return what queries [N, H_q, D] read of their own rows, and the log of their sums of
    exponentials there [N, H_q], with the sinks."""
    out, sums = over_own(q, k, v, layout, options)
    if options.sinks is None:
        return out, sums
    with_sinks = torch.logaddexp(sums, options.sinks.to(sums))
    return out * (sums - with_sinks).exp()[..., None], with_sinks


def of_head(x: Tensor, kv_heads: int, head: int) -> Tensor:
    """Return [N, H_q, ...] of the S query heads that share the KV head, flat [S N, ...] in
    float32."""
    shared = x.shape[1] // kv_heads
    part = x[:, head * shared : (head + 1) * shared].float()
    return part.transpose(0, 1).flatten(0, 1).contiguous()


def spans(head: HeadQueries, keys: int) -> Iterator[slice]:
    """Yield slices of the queries whose scores on so many keys are SCORE_NUMBERS at most."""
    count = len(head.queries)
    most = max(1, SCORE_NUMBERS // max(1, keys))
    for start in range(0, count, most):
        yield slice(start, min(start + most, count))


def weighed_keys(
    head: HeadQueries, keys: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the sums [K], float64, over the queries of their squared attention weights on the
    document's keys [K, D], and the log of each query's sum of exponentials on them, [n]. A query
    counts by `weights` [n]; None: once."""
    squares = torch.zeros(len(keys), dtype=torch.float64, device=keys.device)
    sums = []
    for span in spans(head, len(keys)):
        scores = scored(head, keys, span, head.positions)
        highest = scores.amax(-1, keepdim=True)
        scores.sub_(highest).exp_()
        total = scores.sum(-1)
        sums.append(total.log() + highest[:, 0])
        share = torch.sigmoid(sums[-1] - head.own_sums[span]) / total
        shares = share.square() if weights is None else share.square() * weights[span]
        squares += shares @ scores.square_()
    return squares, torch.cat(sums)


def mass_weights(gram: Tensor, wanted: Tensor, fixed: Tensor) -> Tensor:
    """Return weights w >= 0 [P] that make A w + f nearest to t in squares, by UPDATES
    multiplicative updates from 1: `gram` is A^T A [P, P], `wanted` A^T t and `fixed` A^T f [P]. A
    key that no query sees keeps 1."""
    weights = torch.ones_like(wanted)
    for _ in range(UPDATES):
        read = gram @ weights + fixed
        weights = torch.where(read > 0, weights * wanted / read, weights)
    return weights


def bias_direction(squares: Tensor, sums: Tensor) -> Tensor:
    """Return u [D] with q.u nearest to 1 over queries q in squares, with a ridge: `squares` is
    Q^T Q [D, D], `sums` Q^T 1 [D]."""
    return ridge_solution(squares, sums[:, None], DIRECTION_RIDGE)[:, 0]


def ridge_solution(squares: Tensor, right: Tensor, ridge: float) -> Tensor:
    """Return (S + r I)^-1 R for symmetric S [K, K] and R [K, n]; r is `ridge` times the mean
    diagonal of S."""
    eye = torch.eye(len(squares), dtype=squares.dtype, device=squares.device)
    tiny = torch.finfo(squares.dtype).tiny
    factor = torch.linalg.cholesky(squares + (ridge * squares.diagonal().mean() + tiny) * eye)
    return torch.cholesky_solve(right, factor)


def fitted_head(
    head: HeadQueries,
    document: Tensor,
    neighbours: Tensor,
    direction: Tensor,
    tokens: int,
    first: int,
) -> Tensor:
    """Return N = `tokens` entries [2, N, D] of a document [2, K, D], from its entry `first` on, to
    stand behind `neighbours` [2, G, D]; biases are folded into their keys along `direction` [D]."""
    squares, sums = weighed_keys(head, document[0])
    squares[:first] = -torch.inf
    chosen = squares.topk(tokens).indices.sort().values
    keys, values = document[:, chosen].to(head.queries)
    fixed_keys, fixed_values = neighbours.to(head.queries)
    entry_keys = torch.cat([fixed_keys, keys])  # [G + N, D]
    fixed_count, wide = len(fixed_keys), torch.float64
    # Each query's attention, as if over the document: a share of 1 with its own row.
    total = torch.logaddexp(sums, head.own_sums)
    gram = torch.zeros(tokens, tokens, dtype=wide, device=keys.device)
    wanted, fixed = gram.new_zeros(tokens), gram.new_zeros(tokens)
    for span in spans(head, len(entry_keys)):
        shares = (scored(head, entry_keys, span, head.kept_positions) - total[span, None]).exp_()
        of_kept = shares[:, fixed_count:]
        gram += of_kept.T @ of_kept
        wanted += of_kept.T @ (sums[span] - total[span]).exp()
        fixed += of_kept.T @ shares[:, :fixed_count].sum(-1)
    biases = mass_weights(gram, wanted, fixed).log().clamp(LEAST_BIAS, MOST_BIAS)
    keys = (keys + biases[:, None].to(keys) * direction.to(keys)).to(document.dtype).to(keys)
    entry_keys = torch.cat([fixed_keys, keys])
    gram.zero_()
    missed = gram.new_zeros(tokens, keys.shape[1])
    for span in spans(head, len(entry_keys)):
        scores = scored(head, entry_keys, span, head.kept_positions)
        shares, read = attended(head, span, scores, torch.cat([fixed_values, values]))
        of_kept = shares[:, fixed_count:]
        gram += of_kept.T @ of_kept
        missed += of_kept.T @ (head.targets[span] - read)
    # A ridge towards the kept keys' own values: a key without attention keeps its value.
    moved = ridge_solution(gram, missed, VALUE_RIDGE)
    return torch.stack([keys, values + moved.to(values)]).to(document.dtype)


def feedback(weight: Tensor, lacking: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
    """Return attention outputs [N, H_q D] that, through an output projection `weight`
    [width, H_q D], add what tokens lack, [N, width]: by the pseudo-inverse with a ridge. Of a
    divided base they and the weight are this rank's part, and `total` adds the ranks' squares."""
    weight = weight.float()
    inverse = ridge_solution(total(weight @ weight.T), weight, FEEDBACK_RIDGE)
    return lacking.float() @ inverse


@dataclass
class MatchingAttention:
    """Attend in the one pass over all reference rows, those of the teacher before those of the
    student, and fit each layer when the pass is there. `entries` are the layers' [2, H_kv, N, D],
    by the heads that this rank computes."""

    model: LanguageModel
    document: Tensor  # [L, 2, H_kv, T, D]
    neighbours: Tensor | None  # [L, 2, H_kv, G, D]; None: the document's first `first`
    tokens: int
    first: int
    rows: Sequence[ReferenceRow]
    entries: list[Tensor] = field(default_factory=list)
    states: Tensor | None = None  # [2 N, width], the layer's input

    def __post_init__(self) -> None:
        device = self.model.device
        lengths = [len(row.ids) for row in self.rows]
        of_rows = torch.cat([torch.arange(n) for n in lengths]).to(device)
        self.length = self.document.shape[3]
        fixed_count = self.first if self.neighbours is None else self.neighbours.shape[3]
        self.behind = fixed_count + self.tokens  # where the student's rows begin
        self.teacher_positions = of_rows + self.length
        self.student_positions = of_rows + self.behind
        count = [len(lengths)]
        self.teacher = layout_of(lengths, count, self.teacher_positions)
        self.student = layout_of(lengths, count, self.student_positions)
        self.frequencies = self.model.frequencies()

    def run(self) -> Tensor:
        """Read the rows; return the fitted entries [L, 2, H_kv, N, D] of all heads."""
        device = self.model.device
        ids = torch.tensor([id for row in self.rows for id in row.ids], device=device)
        positions = torch.cat([self.teacher_positions, self.student_positions])
        with self._noting():
            self.model(ids.repeat(2), positions, self)
        entries = torch.stack(self.entries)
        return entries if self.model.tensor is None else self.model.tensor.whole(entries, 2)

    @contextmanager
    def _noting(self) -> Iterator[None]:
        """Note the input of each layer that is about to run."""

        def note(layer: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
            self.states = args[0] if args else given["hidden_states"]

        hooks = [
            layer.register_forward_pre_hook(note, with_kwargs=True) for layer in self.model.layers
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Return the attention [2 N, H_q, D] of the teacher's tokens over the document, and of the
        student's over the layer's entries, which are fitted now."""
        (q_t, q_s), (k_t, k_s), (v_t, v_s) = (x.chunk(2) for x in (q, k, v))
        document = self._own(self.document[layer : layer + 1]).to(q.device, q.dtype)
        taught = attend(q_t, k_t, v_t, self.teacher, [document[0]], options)
        own_out, own_sums = over_rows(q_s, k_s, v_s, self.student, options)
        targets = self._targets(layer, taught)
        moved = self._moved(layer, document[0])
        neighbours = (
            moved[:, :, : self.first]
            if self.neighbours is None
            else self._own(self.neighbours[layer : layer + 1]).to(moved)[0]
        )
        entries = self._fitted(layer, q_s, own_out, own_sums, targets, moved, neighbours, options)
        self.entries.append(entries)
        advance_preparation(1 / len(self.model.layers))
        read = attend(
            q_s, k_s, v_s, self.student, [torch.cat([neighbours, entries], dim=2)], options
        )
        return torch.cat([taught, read])

    def _targets(self, layer: int, taught: Tensor) -> Tensor:
        """Return what the student's tokens are to read [N, H_q, D]: what the teacher's have read,
        and what they lack so far."""
        targets = taught.float()
        if (lacking := self._lacking()) is not None:
            weight = self.model.out_weight(layer)
            if weight is not None:
                ranks = self.model.tensor
                total = (lambda x: x) if ranks is None else ranks.total
                targets = targets + feedback(weight, lacking, total).view_as(targets)
        return targets

    def _own(self, kv: Tensor) -> Tensor:
        return self.model.own_heads(kv)

    def _lacking(self) -> Tensor | None:
        """Return what the student's tokens lack of the teacher's, [N, width]."""
        if self.states is None:
            return None
        taught, student = self.states.reshape(-1, self.states.shape[-1]).chunk(2)
        return taught.float() - student.float()

    def _moved(self, layer: int, document: Tensor) -> Tensor:
        """Return a layer's document [2, H_kv, T, D] with its keys where a prompt behind the
        cartridge sees them."""
        by = self.behind - self.length
        if not by:
            return document
        turned = self.frequencies.of_layer(layer).turned(document[None, 0].double(), by)
        return torch.stack([turned[0].to(document.dtype), document[1]])

    def _fitted(
        self, layer: int, q: Tensor, own_out: Tensor, own_sums: Tensor, targets: Tensor,
        document: Tensor, neighbours: Tensor, options: AttentionOptions,
    ) -> Tensor:  # fmt: skip
        kv_heads = document.shape[1]
        frequencies = self.frequencies.of_layer(layer)

        def fit(h: int) -> Tensor:
            head = self._head(h, kv_heads, q, own_out, own_sums, targets, options)
            squares, sums = far_squares(head.queries, frequencies)
            direction = bias_direction(squares, sums)
            return fitted_head(
                head, document[:, h], neighbours[:, h], direction, self.tokens, self.first
            )

        return torch.stack([*concurrently(fit, range(kv_heads), most_beside(q.device))], dim=1)

    def _head(
        self, h: int, kv_heads: int, q: Tensor, own_out: Tensor, own_sums: Tensor, targets: Tensor,
        options: AttentionOptions,
    ) -> HeadQueries:  # fmt: skip
        """Return the student's queries of the heads that share the KV head `h`."""
        shared = q.shape[1] // kv_heads
        return HeadQueries(
            of_head(q, kv_heads, h) * options.scale, of_head(own_sums, kv_heads, h),
            of_head(own_out, kv_heads, h), of_head(targets, kv_heads, h),
            self.teacher_positions.repeat(shared), self.student_positions.repeat(shared), options,
        )  # fmt: skip


def far_squares(queries: Tensor, frequencies: KeyFrequencies) -> tuple[Tensor, Tensor]:
    """Return Q^T Q [D, D] and Q^T 1 [D], in float64, of queries [n, D] at their positions and at
    those that are FAR behind."""
    near_squares, near_sums = (queries.T @ queries).double(), queries.sum(0).double()
    squares, sums = torch.zeros_like(near_squares), torch.zeros_like(near_sums)

    def turned(rows: Tensor, by: int) -> Tensor:
        return frequencies.turned(rows[None, None], by)[0, 0]

    for by in FAR:
        squares += turned(turned(near_squares, by).T, by)
        sums += turned(near_sums[None], by)[0]
    return squares, sums


@torch.no_grad()
def attention_matched(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, tokens: int, frozen: int,
    study: StudyPrompts = NO_STUDY,
) -> Tensor:  # fmt: skip
    """Return a cartridge [L, 2, H_kv, P, D] made of a document's T tokens `ids`, P <= T, and their
    KV [L, 2, H_kv, T, D].

    A prompt starts at position P after the cartridge and at T after the document. The first
    `frozen` entries are the document's first, with their own values. All ranks of a divided or
    sharded base must call it.
    """
    rows = reference_rows(model, ids, kv, study)
    return compacted(model, kv, tokens, frozen, rows)


@torch.no_grad()
def compacted(
    model: LanguageModel, kv: Tensor, tokens: int, frozen: int, rows: Sequence[ReferenceRow]
) -> Tensor:
    """Return the cartridge of `attention_matched` by these rows."""
    entries = MatchingAttention(model, kv, None, tokens - frozen, frozen, rows).run()
    by = tokens - kv.shape[3]
    first = shifted(kv[:, :, :, :frozen].to(entries), by, model.frequencies())
    return torch.cat([first, entries], dim=3)


@torch.no_grad()
def attention_added(
    model: LanguageModel, ids: Sequence[int], kv: Tensor, start_kv: Tensor, tokens: int,
    study: StudyPrompts = NO_STUDY,
) -> Tensor:  # fmt: skip
    """Return entries [L, 2, H_kv, N, D] to stand beside a cartridge [L, 2, H_kv, G, D] that keeps
    its own, so that both together attend like the document, of N = `tokens`.

    A prompt starts at position G + N after both. `start_kv` has the keys that it will have there.
    """
    rows = reference_rows(model, ids, kv, study)
    return MatchingAttention(model, kv, start_kv, tokens, 0, rows).run()
