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
from protocols.rsa import shape_fault

Parents = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RSAShape:
    """M islands (a power of two), N candidates in each, K parents of an aggregation, T populations
    with the first. Raises DataError for numbers that do not go together."""

    M: int = 1
    N: int = 4
    K: int = 2
    T: int = 3

    def __post_init__(self) -> None:
        fault = shape_fault(self.M, self.N, self.K, self.T)
        if fault is not None:
            name, rule, remedy = fault
            raise DataError(f"rsa: {name} {rule}: got {getattr(self, name)!r}; {remedy}")

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


def draw_parents(shape: RSAShape, step: int, stream: str) -> Parents:
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
