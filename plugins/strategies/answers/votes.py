"""Count votes over answers, plain or weighted by a score of each trace.

answers ["7", None, "7.0", "3"]   weights [1, 9, 1, 1]
  clusters   7: traces 0, 2   weight 2        None never votes
             3: trace 3       weight 1
  winner     the heaviest; of equals the earliest
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cartridge_forge.plugins.strategies.answers.extract import Form, clustered


@dataclass(frozen=True)
class AnswerVote:
    """Hold one answer, as its first trace wrote it, with the indices of its traces."""

    answer: str
    weight: float
    traces: tuple[int, ...]


async def tally(
    answers: Sequence[str | None], form: Form, weights: Sequence[float] | None = None
) -> list[AnswerVote]:
    """Return the votes of equal answers, heaviest first, then earliest. Without `weights` each
    trace weighs 1."""
    weight_list = [1.0] * len(answers) if weights is None else weights
    votes = []
    for members in await clustered(answers, form):
        answer = answers[members[0]]
        assert answer is not None
        votes.append(AnswerVote(answer, math.fsum(weight_list[i] for i in members), tuple(members)))
    return sorted(votes, key=lambda v: (-v.weight, v.traces[0]))


def surest(confidences: Sequence[float], keep_fraction: float) -> list[int]:
    """Return the indices, ascending, of the `keep_fraction` of traces with the highest confidence.
    The count is rounded up, at least one of any; ties go to the earliest.

    `surest([1.0, 3.0, 2.0], 0.5)` is [1, 2].
    """
    count = math.ceil(keep_fraction * len(confidences) - 1e-9)  # 0.7 * 10 is 7, not 8
    ranked = sorted(range(len(confidences)), key=lambda i: (-confidences[i], i))
    return sorted(ranked[: max(count, 1)])
