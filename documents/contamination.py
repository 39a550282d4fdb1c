"""Fail or warn when training prompts duplicate evaluation questions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from documents.near_duplicates import PromptOverlap
from protocols.errors import DataError
from protocols.files import json_lines, write_atomically

Rule = Literal["fail", "warn"]
TOLD = 5  # in an error message; the file has all of them


def clean(found: Sequence[PromptOverlap], rule: Rule, file: Path) -> None:
    """Write the duplicates to `file`, one JSON object a line, or remove it where there are none.

    Raises DataError with the first few when the rule is "fail".
    """
    if not found:
        file.unlink(missing_ok=True)
        return
    write_atomically(file, json_lines(item.as_dict() for item in found))
    if rule == "warn":
        return
    told = "".join(f"\n  {item}" for item in found[:TOLD])
    more = f"\n  and {len(found) - TOLD} more" if len(found) > TOLD else ""
    raise DataError(
        f"{len(found)} training prompts double evaluation questions, so that the questions would "
        f"measure memory:{told}{more}\nAll are in {file}; take them out of the rows or out of the "
        "questions, or set evaluate.contamination: warn (forge eval: --contamination warn)"
    )
