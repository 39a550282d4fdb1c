"""The reward of a word problem: 1 where the last number of the answer is the right one."""

import re


def correct(completion: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and int(numbers[-1]) == int(answer))
