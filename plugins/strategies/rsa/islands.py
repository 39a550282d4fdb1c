"""Draw the parents of each candidate: M islands of N candidates that merge in pairs over T steps.

    L = log2 M, phase = T / (L + 1), islands(t) = M >> min(t // phase, L)

    M = 4, T = 6     t        0 1 2 3 4 5
                     islands  4 4 2 2 1 1

A population is a row of M * N slots. An island is a block of adjacent slots; a merge joins two
blocks. At step t > 0 a slot draws K parents, without replacement, from the previous population's
slots in its block at t: at a merge, the joined block. The module does no I/O.

Source: Venkatraman et al. 2025, "Recursive Self-Aggregation Unlocks Deep Thinking in LLMs".
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from cartridge_forge.protocols.errors import DataError

Parents = tuple[tuple[int, ...], ...]


def shape_fault(M: int, N: int, K: int, T: int) -> tuple[str, str, str] | None:
    """Return the first of the four numbers that does not fit those before it, as (name, broken
    rule, remedy), or None where all fit."""
    for name, value in (("M", M), ("N", N), ("K", K), ("T", T)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            return name, "must be a whole number >= 1", "raise it"
    if M & (M - 1):
        below = 1 << (M.bit_length() - 1)
        rule = "must be a power of two, for islands merge in pairs"
        return "M", rule, f"use {below} or {2 * below}"
    if K > N:
        return "K", f"must be <= N ({N}), the candidates of an island", "lower K or raise N"
    stages = M.bit_length()
    if T % stages:
        below = T - T % stages
        rule = f"must be divisible by log2(M) + 1 = {stages}, for every stage of merging takes as "
        rule += f"many populations (M is {M})"
        return "T", rule, f"use {f'{below} or ' if below else ''}{below + stages}, or another M"
    return None


@dataclass(frozen=True)
class RSAShape:
    """Hold M islands (a power of two), N candidates in each, K parents of an aggregation, and T
    populations with the first. Raises DataError for numbers that are inconsistent."""

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
        """Return the number of candidates of a population."""
        return self.M * self.N

    @property
    def merges(self) -> int:
        """Return L, the number of merges until one island is left."""
        return self.M.bit_length() - 1

    @property
    def schedule(self) -> tuple[int, ...]:
        """Return the islands of every population: (4, 4, 2, 2, 1, 1) for M = 4, T = 6."""
        return tuple(map(self.islands, range(self.T)))

    def islands(self, step: int) -> int:
        """Return the islands of the population at `step`."""
        phase = self.T // (self.merges + 1)
        return self.M >> min(step // phase, self.merges)

    def block(self, slot: int, step: int) -> range:
        """Return the slots of the island that `slot` is in at `step`."""
        size = self.slots // self.islands(step)
        first = slot // size * size
        return range(first, first + size)


def draw_parents(shape: RSAShape, step: int, stream: str) -> Parents:
    """Return for every slot of population `step` its K parent slots in the previous population, in
    prompt order; no parents at step 0.

    `stream` seeds the draw: "rsa/7/question 3" gives equal parents in every process.
    """
    if step == 0:
        return ((),) * shape.slots
    return tuple(
        tuple(random.Random(f"{stream}/{step}/{slot}").sample(shape.block(slot, step), shape.K))
        for slot in range(shape.slots)
    )
