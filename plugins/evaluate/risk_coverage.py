"""Tell what a confidence is worth: risk by coverage, and what a fallback recovers by it.

confidences, losses -> RiskCoverage: the mean loss of the share that is most confident
losses of two ways to answer -> fallback_recovery: of what an oracle gains with the same share
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RiskCoverage:
    """Hold the mean loss (`risks`) of the answers that are most confident, by their share of all
    (`coverages`), and the mean of the risks (`area`)."""

    coverages: tuple[float, ...]
    risks: tuple[float, ...]
    area: float


def risk_coverage(confidences: Sequence[float], losses: Sequence[float]) -> RiskCoverage:
    """Return risk by coverage, one point for each confidence that occurs. Answers of one confidence
    come together, so that their order does not matter. Raises ValueError for none, or for lists of
    two lengths."""
    pairs = sorted(zip(confidences, losses, strict=True), reverse=True)
    if not pairs:
        raise ValueError("there is no answer")
    coverages, risks, total = [], [], 0.0
    for count, (confidence, loss) in enumerate(pairs, start=1):
        total += loss
        if count == len(pairs) or pairs[count][0] != confidence:
            coverages.append(count / len(pairs))
            risks.append(total / count)
    edges = [0.0, *coverages]
    area = sum(risk * (edges[i + 1] - edges[i]) for i, risk in enumerate(risks))
    return RiskCoverage(tuple(coverages), tuple(risks), area)


def fallback_recovery(
    confidences: Sequence[float],
    losses: Sequence[float],
    alternatives: Sequence[float],
    share: float,
) -> float | None:
    """Return which part of an oracle's gain is had where the `share` of answers that is least
    confident gets the loss of another way to answer, of `alternatives`, in place of its own.

    The oracle gives as many answers the other way, those that gain most and no loser; None where
    it gains nothing. Of equal confidences the first are taken. Raises ValueError for lists of
    several lengths, and a share outside of 0 to 1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"a share is from 0 to 1: got {share}")
    gains = [loss - other for loss, other in zip(losses, alternatives, strict=True)]
    count = round(share * len(gains))
    best = sum(max(0.0, gain) for gain in sorted(gains, reverse=True)[:count])
    least = sorted(range(len(gains)), key=lambda i: confidences[i])[:count]
    return sum(gains[i] for i in least) / best if best > 0 else None
