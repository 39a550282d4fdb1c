"""Write the panel model's prompts, which ask it to review several answers and give its own.

The aggregation prompt is that of recursive self-aggregation (Venkatraman et al., 2025), in words of
the tiny tokenizer. Other words would be encoded as bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from protocols.errors import DataError


def aggregation_prompt(question: str, candidates: Sequence[str]) -> str:
    """Return the question (from `prompts.option_prompt`) with numbered candidate responses below.

    Every candidate takes one line, without its own line breaks; an empty one keeps its number. A
    line begins with a space, else its first word is encoded as bytes. Raises DataError if empty.
    """
    if not candidates:
        raise DataError("there are no candidates to aggregate; give at least one, or just ask")
    lines = [" ".join([f" {i}:", *c.split()]) for i, c in enumerate(candidates, start=1)]
    return "\n".join([question, " review the answers:", *lines])
