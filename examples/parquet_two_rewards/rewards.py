"""Two rewards: of a right answer, and of a short one."""

import re
from collections.abc import Sequence
from typing import Any

WORDS = 4  # of "the answer is 7."


def correct(completion: str, answer: int) -> float:
    """Give 1 where the last number is the answer."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def brief(completions: Sequence[str], **columns: Any) -> list[float]:
    """Give 1 for WORDS words or fewer, less for more: a function as TRL calls them."""
    counts = [len(completion.split()) for completion in completions]
    return [min(1.0, WORDS / count) if count else 1.0 for count in counts]
