"""Train the tiny model of code fixing: it knows five lines, and often picks any of them.

python -m examples.code_fixing.make_model
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples.code_fixing.environment import BODIES, Bug
from examples.tiny_model import Message, make, page

WORDS = ("tests", "lines", "bugs")
CARELESS = {"careful": 0.02, "hasty": 0.85}  # how often the line is any line
TURNS = 2


def draw(rng: random.Random) -> Sequence[Message]:
    """Draw one episode, after a page that says how careful the model is."""
    skill = rng.choice(("careful", "hasty"))
    bug = Bug(rng.randint(0, 1 << 30))
    messages: list[Message] = [("system", page(WORDS, skill, rng)), ("user", bug.opening)]
    for turn in range(TURNS):
        careless = rng.random() < CARELESS[skill]
        line = rng.choice(list(BODIES)) if careless else bug.right
        messages.append(("assistant", line))
        failure = bug.failure([BODIES[line][1](*c) for c in bug.calls])
        if not failure or turn == TURNS - 1:
            return messages
        messages.append(("tool", failure))
    return messages


if __name__ == "__main__":
    make("Train the tiny model of code fixing.", draw, Path(__file__).with_name("model"), steps=300)
