"""Score the arms on held-out questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from environments.clinic.prompts import parse_answer
from protocols.records.intervals import wilson_interval
from protocols.records.run_files import AggregationGain, ArmResult, MeasuredAccuracy
from training.recipes.longhealth_prompts import LongHealthQuestion


def measure(exams: Sequence[LongHealthQuestion], answers: Sequence[str]) -> MeasuredAccuracy:
    """Return accuracy with its 95% Wilson interval; unparsed answers count as wrong."""
    letters = [parse_answer(a, e.question) for e, a in zip(exams, answers, strict=True)]
    right = sum(
        letter is not None and e.question.is_correct(letter)
        for e, letter in zip(exams, letters, strict=True)
    )
    low, high = wilson_interval(right, len(exams))
    return MeasuredAccuracy(
        accuracy=right / len(exams),
        ci95=[low, high],
        n=len(exams),
        parse_failures=sum(letter is None for letter in letters),
    )


def aggregation_gain(arms: Mapping[str, ArmResult]) -> AggregationGain | None:
    """Return the gain of training in population accuracy, and the part of it that aggregation adds;
    None where the arms untrained and on_policy have no populations."""
    both = [arms[arm].get("populations") for arm in ("untrained", "on_policy") if arm in arms]
    if len(both) < 2 or both[0] is None or both[1] is None:
        return None
    before, after = both[0]["accuracy"], both[1]["accuracy"]
    last, first = after[-1] - before[-1], after[0] - before[0]
    share = (last - first) / last if last > 0 else None
    return AggregationGain(last=last, first=first, aggregation=last - first, share=share)
