"""Train the tiny model of the calculator: it knows the two calls, and often guesses.

python -m examples.calculator.make_model
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from examples.tiny_model import Message, make, page

WORDS = ("numbers", "tools", "answers")
GUESSES = {"careful": 0.0, "hasty": 0.5}  # how often the model submits before it has calculated
SLIPS = {"careful": 0.0, "hasty": 0.3}  # how often it submits another number than it read


PRODUCTS = sorted({a * b for a in range(2, 10) for b in range(2, 10)})


def call(tool: str, **arguments: str) -> str:
    return json.dumps({"tool": tool, "arguments": arguments})


def draw(rng: random.Random) -> Sequence[Message]:
    """Draw one episode, after a page that says how careful the model is."""
    skill = rng.choice(("careful", "hasty"))
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    messages: list[Message] = [
        ("system", page(WORDS, skill, rng)), ("user", f"what is {a} * {b}?"),
    ]  # fmt: skip
    guess = str(rng.choice(PRODUCTS))
    if rng.random() < GUESSES[skill]:
        return [*messages, ("assistant", call("submit", answer=guess))]
    right = str(a * b)
    messages += [("assistant", call("calculate", expression=f"{a} * {b}")), ("tool", right)]
    answer = guess if rng.random() < SLIPS[skill] else right
    return [*messages, ("assistant", call("submit", answer=answer))]


if __name__ == "__main__":
    make(
        "Train the tiny model of the calculator.",
        draw,
        Path(__file__).with_name("model"),
        steps=900,
    )
