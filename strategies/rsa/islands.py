"""Who aggregates whom: M islands of N candidates that merge in pairs, over T populations. Pure.

    L = log2 M, phase = T / (L + 1), islands(t) = M >> min(t // phase, L)

    M = 4, T = 6     t        0 1 2 3 4 5
                     islands  4 4 2 2 1 1

A population is a row of M * N slots; an island is a block of neighbours in it, and a merge makes
one block of two. At step t > 0 a slot draws its K parents, without replacement, from the slots of
the previous population that lie in the block that it is in at t: at a merge, the new block.

Source: Venkatraman et al. 2025, "Recursive Self-Aggregation Unlocks Deep Thinking in LLMs".
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from protocols.errors import DataError

Parents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shape:
    """M islands (a power of two), N candidates in each, K parents of an aggregation, T populations
    with the first. Raises DataError for numbers that do not go together."""

    M: int = 1
    N: int = 4
    K: int = 2
    T: int = 3

    def __post_init__(self) -> None:
        for name in ("M", "N", "K", "T"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise DataError(f"rsa: {name} must be a whole number >= 1: got {value!r}; raise it")
        if self.M & (self.M - 1):
            raise DataError(
                f"rsa: M must be a power of two, for islands merge in pairs: got {self.M}; "
                f"use {1 << (self.M.bit_length() - 1)} or {1 << self.M.bit_length()}"
            )
        if self.K > self.N:
            raise DataError(
                f"rsa: K must be <= N ({self.N}), the candidates of an island: got {self.K}; lower "
                "K or raise N"
            )
        if self.T % (self.merges + 1):
            below = self.T - self.T % (self.merges + 1)
            raise DataError(
                f"rsa: T must be divisible by log2(M) + 1 = {self.merges + 1}, so that every stage "
                f"of merging takes as many populations: got T = {self.T} with M = {self.M}; use "
                f"{f'{below} or ' if below else ''}{below + self.merges + 1}, or another M"
            )

    @property
    def slots(self) -> int:
        """Candidates of a population."""
        return self.M * self.N

    @property
    def merges(self) -> int:
        """L, how often islands merge until one is left."""
        return self.M.bit_length() - 1

    @property
    def schedule(self) -> tuple[int, ...]:
        """The islands of every population: (4, 4, 2, 2, 1, 1) of M = 4, T = 6."""
        phase = self.T // (self.merges + 1)
        return tuple(self.M >> min(t // phase, self.merges) for t in range(self.T))

    def block(self, slot: int, step: int) -> range:
        """The slots of the island that `slot` is in at `step`."""
        size = self.slots // self.schedule[step]
        first = slot // size * size
        return range(first, first + size)


def draw_parents(shape: Shape, step: int, stream: str) -> Parents:
    """For every slot of population `step` the K slots of the one before that it is shown, in the
    order that it is shown them; nothing for step 0.

    `stream` names the draw: "rsa/7/question 3" gives the same parents in every process.
    """
    if step == 0:
        return ((),) * shape.slots
    return tuple(
        tuple(random.Random(f"{stream}/{step}/{slot}").sample(shape.block(slot, step), shape.K))
        for slot in range(shape.slots)
    )
