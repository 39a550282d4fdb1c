"""Count votes over answers, plain or weighted by a score of each trace.

answers ["7", None, "7.0", "3"]   weights [1, 9, 1, 1]
  clusters   7: traces 0, 2   weight 2        None never votes
             3: trace 3       weight 1
  winner     the heaviest; of equals the earliest

`text_clusters` clusters texts by their words with TF-IDF and k-means, deterministically.

    texts --words--> counts x (1 + ln((1 + n) / (1 + n with the word))) --> unit rows [n, words]
    centres: k-means++ from the caller's generator, then Lloyd's steps until no text moves

Equal texts are always in one cluster; there are never more clusters than distinct texts.
"""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


Rows = NDArray[np.float64]
MOST_STEPS = 50


def text_clusters(texts: Sequence[str], k: int, rng: random.Random) -> list[int]:
    """Return the cluster of each text, numbered from 0 in order of appearance."""
    if not texts:
        return []
    rows = tf_idf(texts)
    numbers: dict[int, int] = {}
    return [numbers.setdefault(c, len(numbers)) for c in _k_means(rows, k, rng)]


def tf_idf(texts: Sequence[str]) -> Rows:
    """Return [n, words], rows of length 1; a text without words is a row of zeros."""
    counts = [Counter(re.findall(r"\w+", t.casefold())) for t in texts]
    words = {w: i for i, w in enumerate(sorted(set().union(*counts)))}
    rows = np.zeros((len(texts), max(len(words), 1)))
    for row, count in zip(rows, counts, strict=True):
        for word, times in count.items():
            row[words[word]] = times
    present = (rows > 0).sum(0)
    rows *= 1 + np.log((1 + len(texts)) / (1 + present))
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return rows / np.where(norms > 0, norms, 1)


def _k_means(rows: Rows, k: int, rng: random.Random) -> list[int]:
    centres = rows[[rng.randrange(len(rows))]]
    while len(centres) < k:
        nearest = _distances(rows, centres).min(1)
        nearest[nearest < 1e-12] = 0  # a text that is a centre already
        if not nearest.any():
            break
        chosen = rng.choices(range(len(rows)), nearest.tolist())
        centres = np.concatenate([centres, rows[chosen]])
    labels = _distances(rows, centres).argmin(1)
    for _ in range(MOST_STEPS):
        for c in range(len(centres)):
            if (labels == c).any():
                centres[c] = rows[labels == c].mean(0)
        moved = _distances(rows, centres).argmin(1)
        if (moved == labels).all():
            break
        labels = moved
    return [int(label) for label in labels]


def _distances(rows: Rows, centres: Rows) -> Rows:
    """Return squared distances [n, k]."""
    return ((rows[:, None] - centres[None]) ** 2).sum(-1)
