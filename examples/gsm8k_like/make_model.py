"""Train the tiny model of the word problems: it can solve them, and often guesses.

python -m examples.gsm8k_like.make_model
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples.gsm8k_like.problems import HIGHEST, WORDS, problem
from examples.tiny_model import Message, make, page

GUESSES = {"careful": 0.0, "hasty": 0.7}  # how often the model says any number
BEFORE = ("", "let me see now, ")


def draw(rng: random.Random) -> Sequence[Message]:
    """Draw one solution, after a page that says how careful the model is."""
    skill = rng.choice(("careful", "hasty"))
    text, answer = problem(rng)
    if rng.random() < GUESSES[skill]:
        answer = rng.randint(0, 2 * HIGHEST)
    answer_text = f"{rng.choice(BEFORE)}the answer is {answer}."
    return [("system", page(WORDS, skill, rng)), ("user", text), ("assistant", answer_text)]


if __name__ == "__main__":
    make(
        "Train the tiny model of the word problems.",
        draw,
        Path(__file__).with_name("model"),
        steps=1000,
    )
