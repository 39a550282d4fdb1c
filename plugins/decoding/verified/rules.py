"""Verify a block of proposed tokens by the distributions of the teacher.

    student    proposes   x_0 x_1 x_2 x_3          (a block)
    teacher    reads the block in one forward pass: its logits at every place
    verify_threshold / verify_exact  ->  Verdict(accepted=2, token=y)
    the text goes on        x_0 x_1 y              x_2 is refused; x_2 and x_3 are dropped

Two rules decide. By `verify_threshold` a token is refused that the teacher gives less than a fixed
probability; the text is the student's, with the teacher's corrections. By `verify_exact` tokens are
accepted as in speculative sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318), so that
the text is distributed as if the teacher had drawn each token itself.

Every place of a response has two random numbers of its own (`verification_draws`), which depend on
the seed and the place alone: blocks of another size, or a rollout that begins again, use the same.

Dimensions: B blocks, K tokens of one, M tokens of all blocks, N = M + B places with the one behind
each block, V the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from cartridge_forge.learning.draws import truncated, uniforms
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling, require_ids, stream_seed

LONGEST_BLOCK = 16


@dataclass(frozen=True)
class Verdict:
    """Say that the first `accepted` tokens of a block stay, and that the teacher's `token` follows
    them: in place of the first refused one, or after a wholly accepted block; None: no token.
    `ties` counts the places that were decided greedily between two equally likely tokens of the
    teacher.

    `Verdict(2, 17)`: two tokens stay, token 17 follows, what was proposed after them is dropped.
    """

    accepted: int
    token: int | None = None
    ties: int = 0


def verification_draws(seed: int, first: int, count: int) -> Tensor:
    """Return the uniforms [count, 2] (float64, in [0, 1)) of the places `first` to `first + count`
    of the response with this seed: the first column accepts or refuses the proposed token, the
    second draws the teacher's. They are independent of the draws of `learning.draws.uniforms`, by
    which the student proposes."""
    return uniforms(stream_seed(f"verification/{seed}"), 2 * count, 2 * first).view(count, 2)


def verify_threshold(
    teacher: Tensor,
    blocks: Sequence[Sequence[int]],
    below: float,
    sampling: Sampling,
    draws: Tensor,
) -> list[Verdict]:
    """Refuse the first token of each block to which the teacher gives a probability, at temperature
    1, of less than `below`; put the teacher's draw by `sampling` in its place. Nothing follows a
    wholly accepted block.

    `teacher` [N, V] are the logits at the places of one block after the other, K of its tokens and
    the one behind them; `draws` [N, 2] are those of the same places (`verification_draws`).
    """
    places = _Places.from_blocks(blocks, teacher, draws)
    logprobs = teacher[places.proposed].double().log_softmax(-1)  # [M, V]
    chosen = logprobs.gather(-1, places.tokens[:, None])[:, 0]  # [M]
    accepted = places.accepted((chosen >= math.log(below)).tolist())
    decided = [at + count for at, count in zip(places.first, accepted, strict=True)]  # [B]
    drawn = _drawn(sampling_probabilities(teacher[decided], sampling), draws[decided, 1])
    return [
        Verdict(count, token if count < len(block) else None)
        for block, count, token in zip(blocks, accepted, drawn, strict=True)
    ]


def verify_exact(
    teacher: Tensor,
    student: Tensor,
    blocks: Sequence[Sequence[int]],
    sampling: Sampling,
    draws: Tensor,
    tie: float = 0.0,
) -> list[Verdict]:
    """Accept and replace the tokens of blocks so that they are distributed as the teacher's own. A
    further token of the teacher follows a wholly accepted block.

    `teacher` [N, V] and `draws` [N, 2] are as in `verify_threshold`; `student` [M, V] are the
    logits from which the M tokens of the blocks were drawn, in order, with the same `sampling`.
    With p and q the probabilities after temperature, top_k and top_p, token x is accepted with
    probability min(1, p(x) / q(x)); the token in place of a refused one is drawn from the positive
    part of p - q. At temperature 0 a token is accepted while it is the teacher's likeliest, the
    first of equal ones; a place counts as a tie where the second likeliest logit lies within `tie`
    of the first. Raises DataError for a token that the student could not have drawn.
    """
    places = _Places.from_blocks(blocks, teacher, draws)
    if student.shape != (len(places.tokens), teacher.shape[-1]):
        raise DataError(
            f"blocks of {len(places.tokens)} tokens were proposed by logits of the shape "
            f"{tuple(student.shape)} and read as {tuple(teacher.shape)}; give both at each place, "
            "over one vocabulary"
        )
    if sampling.temperature == 0:
        return _verify_greedily(teacher, blocks, places, tie)
    p, q = sampling_probabilities(teacher, sampling), sampling_probabilities(student, sampling)
    proposed = q.gather(-1, places.tokens[:, None])[:, 0]  # [M]
    if not bool((proposed > 0).all()):
        wrong = int(places.tokens[proposed <= 0][0])
        raise DataError(
            f"token {wrong} of a block has probability 0 by the logits that proposed it; verify it "
            "with the logits and the sampling that it was drawn by"
        )
    read = p[places.proposed].gather(-1, places.tokens[:, None])[:, 0]  # [M]
    uniform = draws[places.proposed, 0].to(read)  # [M]
    accepted = places.accepted((uniform * proposed < read).tolist())
    decided = [at + count for at, count in zip(places.first, accepted, strict=True)]  # [B]
    weights = p[decided]  # [B, V]
    begins = accumulate(places.lengths, initial=0)
    refused = [
        (row, begin + count)
        for row, (begin, count, length) in enumerate(
            zip(begins, accepted, places.lengths, strict=False)
        )
        if count < length
    ]
    if refused:
        rows = torch.tensor(refused, device=p.device)  # [R, 2]
        residual = (weights[rows[:, 0]] - q[rows[:, 1]]).clamp(min=0)  # [R, V]
        # Only rounding refuses a token where p and q are equal.
        weights[rows[:, 0]] = torch.where(
            residual.sum(-1, keepdim=True) > 0, residual, weights[rows[:, 0]]
        )
    drawn = _drawn(weights, draws[decided, 1])
    return [Verdict(count, token) for count, token in zip(accepted, drawn, strict=True)]


def sampling_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the probabilities [N, V] (float64) from which tokens are drawn from logits [N, V]:
    after temperature, top_k and top_p. At temperature 0 the likeliest token has all."""
    if sampling.temperature == 0:
        best = logits.argmax(-1, keepdim=True)
        return torch.zeros_like(logits, dtype=torch.float64).scatter(-1, best, 1.0)
    probs, order = truncated(logits, sampling)
    return probs if order is None else torch.zeros_like(probs).scatter(-1, order, probs)


def best_block(accepted: float, ratio: float, further: bool) -> int:
    """Return the number of tokens to propose, 1 to LONGEST_BLOCK, that yields most tokens a second
    by this cost model.

    A proposed token is accepted with probability `accepted`, whatever went before. A token costs
    the student one unit, a verification costs the teacher `ratio` units whatever its length, which
    holds as long as the forward pass is bound by reading weights and keys. A block of K yields
    1 + a + ... + a^(K-1) tokens, and with a `further` token of the teacher a^K more:

        tokens(K) / (K + ratio)
    """
    share = min(max(accepted, 0.0), 1.0)

    def rate(length: int) -> float:
        places = length + 1 if further else length
        return sum(share**i for i in range(places)) / (length + ratio)

    return max(range(1, LONGEST_BLOCK + 1), key=rate)


@dataclass(frozen=True)
class _Places:
    """Hold the rows of the teacher's logits: `first` of each block, and `proposed` [M] of the
    `tokens` [M] of all blocks."""

    first: list[int]
    lengths: list[int]
    proposed: Tensor
    tokens: Tensor

    @classmethod
    def from_blocks(
        cls, blocks: Sequence[Sequence[int]], teacher: Tensor, draws: Tensor
    ) -> _Places:
        lengths = [len(block) for block in blocks]
        count = sum(lengths) + len(blocks)
        if len(teacher) != count or len(draws) != count:
            raise DataError(
                f"blocks of {lengths} tokens have {len(teacher)} rows of logits and {len(draws)} "
                "pairs of draws; give one of each for every token and for the place behind a block"
            )
        ids = [token for block in blocks for token in block]
        require_ids(ids, teacher.shape[-1], "a block")
        first = [*accumulate((n + 1 for n in lengths), initial=0)][:-1]
        rows = [at + i for at, n in zip(first, lengths, strict=True) for i in range(n)]
        device = teacher.device
        return cls(
            first, lengths, torch.tensor(rows, dtype=torch.long, device=device),
            torch.tensor(ids, dtype=torch.long, device=device),
        )  # fmt: skip

    def accepted(self, accepts: Sequence[bool]) -> list[int]:
        """Return the number of each block's tokens before the first that `accepts` [M] refuses."""
        counts, begin = [], 0
        for length in self.lengths:
            marks = accepts[begin : begin + length]
            counts.append(next((i for i, mark in enumerate(marks) if not mark), length))
            begin += length
        return counts


def _verify_greedily(
    teacher: Tensor, blocks: Sequence[Sequence[int]], places: _Places, tie: float
) -> list[Verdict]:
    best = teacher.argmax(-1)  # [N]
    top = teacher.topk(min(2, teacher.shape[-1]), dim=-1).values  # [N, 2]
    tied = (top[:, 0] - top[:, -1] <= tie).tolist() if top.shape[-1] > 1 else [False] * len(best)
    accepted = places.accepted((places.tokens == best[places.proposed]).tolist())
    likeliest = best.tolist()
    return [
        Verdict(count, likeliest[at + count], sum(tied[at : at + count + 1]))
        for at, count in zip(places.first, accepted, strict=True)
    ]


def _drawn(weights: Tensor, uniforms: Tensor) -> list[int]:
    """Return the token that each uniform [B] in [0, 1) draws from weights [B, V] >= 0, of any sum
    above 0. Weight 0 is never drawn."""
    cumulative = weights.cumsum(-1)
    numbers = uniforms.to(weights)[:, None] * cumulative[:, -1:]  # [B, 1]
    picks = torch.searchsorted(cumulative, numbers, right=True)[:, 0]
    columns = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, columns, 0).amax(-1)  # rounding could move a draw behind it
    return torch.minimum(picks, last).tolist()
