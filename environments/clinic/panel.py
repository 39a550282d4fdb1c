"""What the tiny panel is asked: to review several answers to a question, then to give its own.

The aggregation prompt of recursive self-aggregation (Venkatraman et al., 2025), in words that
the tiny tokenizer knows: any other would fall apart into bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import DataError


def aggregation_prompt(question: str, candidates: Sequence[str]) -> str:
    """The question (`environments.clinic.prompts.option_prompt`) and the numbered candidate
    responses under it.

    Every candidate takes one line, whatever its own line breaks; one that says nothing keeps its
    number. A line begins with a space: without one its first word would fall apart into bytes.
    Raises DataError when there are no candidates.
    """
    if not candidates:
        raise DataError("there are no candidates to aggregate; give at least one, or just ask")
    lines = [" ".join([f" {i}:", *c.split()]) for i, c in enumerate(candidates, start=1)]
    return "\n".join([question, " review the answers:", *lines])
