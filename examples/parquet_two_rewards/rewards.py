"""Two rewards: of a right answer, and of a short one."""

import re


def correct(completion: str, answer: int) -> float:
    """Give 1 where the last number is the answer."""
    numbers = re.findall(r"\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == answer)


def brief(completions, **columns):
    """Give 1 for four words or fewer, less for more: a function as TRL calls them."""
    words = [len(completion.split()) for completion in completions]
    return [1.0 if count <= 4 else 4 / count for count in words]
