"""Train the tiny model of Sokoban: it knows the moves, and often makes a careless one.

python -m examples.sokoban.make_model
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from examples.sokoban.boards import MOVES, Board, draw_board, solution
from examples.tiny_model import Message, make, page

WORDS = ("boxes", "moves", "walls")
CARELESS = {"careful": 0.0, "hasty": 0.6}  # how often a move is any move
MOST = 5  # moves of an episode


def draw(rng: random.Random) -> Sequence[Message]:
    """Draw one episode, after a page that says how careful the model is."""
    skill = rng.choice(("careful", "hasty"))
    board: Board = draw_board(rng.randint(0, 1 << 20))
    messages: list[Message] = [("system", page(WORDS, skill, rng))]
    for _ in range(MOST):
        messages.append(("user", board.text))
        careless = rng.random() < CARELESS[skill]
        move = rng.choice(list(MOVES)) if careless else (solution(board) or ("up",))[0]
        messages.append(("assistant", move))
        board = board.moved(move)
        if board.solved:
            break
    return messages


if __name__ == "__main__":
    make("Train the tiny model of Sokoban.", draw, Path(__file__).with_name("model"), steps=900)
