"""Draw, move and solve small Sokoban boards; text in, text out.

. P .        P the player, B the box, G the goal, p the player on the goal
. B .        a move is up, down, left or right; the player pushes the box, walls are all around
. G .        solved when the box is on the goal
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
Place = tuple[int, int]  # row, column


@dataclass(frozen=True)
class Board:
    size: int
    player: Place
    box: Place
    goal: Place

    @property
    def solved(self) -> bool:
        return self.box == self.goal

    @property
    def text(self) -> str:
        rows = [["."] * self.size for _ in range(self.size)]
        rows[self.goal[0]][self.goal[1]] = "G"
        rows[self.box[0]][self.box[1]] = "B"
        rows[self.player[0]][self.player[1]] = "p" if self.player == self.goal else "P"
        return "\n".join(" ".join(row) for row in rows)

    def moved(self, move: str) -> Board:
        """Return the board after a move; one that is no move, or is blocked, changes nothing."""
        if move not in MOVES:
            return self
        down, right = MOVES[move]
        to = (self.player[0] + down, self.player[1] + right)
        if not self._inside(to):
            return self
        if to != self.box:
            return replace(self, player=to)
        pushed = (to[0] + down, to[1] + right)
        return replace(self, player=to, box=pushed) if self._inside(pushed) else self

    def _inside(self, square: Place) -> bool:
        return all(0 <= at < self.size for at in square)


@lru_cache(maxsize=1 << 16)
def solution(board: Board) -> tuple[str, ...] | None:
    """Return the moves of a shortest way that solves the board; None if there is none."""
    paths: dict[Board, tuple[str, ...]] = {board: ()}
    waiting = deque([board])
    while waiting:
        at = waiting.popleft()
        if at.solved:
            return paths[at]
        for move in MOVES:
            moved = at.moved(move)
            if moved not in paths:
                paths[moved] = (*paths[at], move)
                waiting.append(moved)
    return None


def draw_board(seed: int, size: int = 3, moves: tuple[int, int] = (2, 4)) -> Board:
    """Return a board whose shortest solution has `moves` (least, most) moves."""
    rng = random.Random(f"sokoban/{seed}")
    places = [(row, column) for row in range(size) for column in range(size)]
    while True:
        board = Board(size, *rng.sample(places, 3))
        moves_needed = solution(board)
        if moves_needed is not None and moves[0] <= len(moves_needed) <= moves[1]:
            return board
