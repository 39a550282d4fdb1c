"""Measure what a document tells about the answers of self-study, and refuse those that it does not
help with: where the teacher with and without the document agree, there is nothing to learn.

    gain = mean over the answer's tokens of log T(token | document) - log T(token | no document)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from documents.synthesis_rows import StudyRow
from environments.rollout import BARE
from protocols.records.answers import mean_nll
from protocols.types import GenerateRequest, Sampling
from training.recipes.agreement import StudyQuestion
from training.recipes.study_prompts import context_ref
from training.rollouts import TimedGenerate

NO_GAIN = "no_gain"


async def gains(
    studied: Sequence[StudyQuestion],
    bare: Mapping[str, tuple[int, ...]],
    generate: TimedGenerate,
) -> dict[str, float]:
    """Return the gain of each question with an answer, nats a token, by its key. `bare` has the
    prompt without a document by key."""
    asked = [s for s in studied if s.answer_ids]
    once = Sampling(temperature=0.0, max_tokens=1)
    requests = []
    for s in asked:
        for name, ids, prefix in (
            ("document", s.prompt_ids, context_ref((s.document,))),
            ("none", bare[s.key], BARE),
        ):
            requests.append(
                GenerateRequest(
                    f"gain/{name}/{s.key}", (*ids, *s.answer_ids), prefix, once, 0,
                    prompt_logprobs=True,
                )
            )  # fmt: skip
    read, _ = await generate(requests) if requests else ([], 0.0)
    found = {}
    for i, s in enumerate(asked):
        whole, none = (mean_nll(c, len(s.answer_ids)) for c in read[2 * i : 2 * i + 2])
        if whole is not None and none is not None:
            found[s.key] = none - whole
    return found


def weighed(rows: Sequence[StudyRow], found: Mapping[str, float], least: float) -> list[StudyRow]:
    """Return the rows with their gains; those of less than `least` are refused."""
    return [
        replace(row, gain=found[row.key], refused=NO_GAIN if found[row.key] < least else "")
        if row.key in found
        else row
        for row in rows
    ]
