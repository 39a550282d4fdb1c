"""Describe how a rotary embedding turns keys with their position, and measure it.

Keys are moved to other positions where cartridges are composed. Families pair a key's numbers
differently, turn a part of them, or turn only some layers, and layers may differ in their
frequencies. None of that is read from names: keys of the same token at positions 0 and 1 show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

FIT = 1e-4  # of the largest key: how exactly a turned key is met in float32


@dataclass(frozen=True)
class KeyFrequencies:
    """Hold the radians per position `values` [L or 1, D], float64, by which each number of a key
    turns with its partner, number `partners` [L or 1, D]; the first of a pair has a negative
    one. A number that does not turn has 0."""

    values: Tensor
    partners: Tensor

    def turned(self, keys: Tensor, by: int) -> Tensor:
        """Return keys [L, H_kv, P, D] moved by `by` positions."""
        angle = (self.values.to(keys.device) * by)[:, None, None]
        partners = self.partners.to(keys.device)[:, None, None].expand(keys.shape)
        return keys * angle.cos() + keys.gather(-1, partners) * angle.sin()


def half_split(frequencies: Tensor, size: int) -> KeyFrequencies:
    """Return n `frequencies` of keys of `size`, whose pairs are the numbers (i, i + n), as in
    Llama's family."""
    return _pairs(frequencies, size, 0, interleaved=False)


def stacked(layers: Sequence[KeyFrequencies]) -> KeyFrequencies:
    """Return the frequencies of all layers from those of each."""
    return KeyFrequencies(
        torch.cat([one.values for one in layers]), torch.cat([one.partners for one in layers])
    )


def fitted(before: Tensor, after: Tensor, known: Sequence[Tensor]) -> KeyFrequencies | None:
    """Return which of the `known` frequencies, [n] each, turn keys [T, H_kv, D] of tokens into
    those one position `after`, and which pairs; None where none does."""
    keys, moved = (x.transpose(0, 1)[None].double() for x in (before, after))
    for found in _candidates(known, keys.shape[-1]):
        if (found.turned(keys, 1) - moved).abs().amax() <= FIT * keys.abs().amax():
            return found
    return None


def _candidates(known: Sequence[Tensor], size: int) -> Iterator[KeyFrequencies]:
    yield half_split(torch.zeros(0), size)  # a layer without positions
    for frequencies in known:
        rest = size - 2 * len(frequencies)
        if rest >= 0:
            for begin, interleaved, way in product({0, rest}, (False, True), (1, -1)):
                yield _pairs(way * frequencies, size, begin, interleaved)


def _pairs(frequencies: Tensor, size: int, begin: int, interleaved: bool) -> KeyFrequencies:
    n = len(frequencies)
    pairs = torch.arange(begin, begin + 2 * n)
    first, second = (pairs[::2], pairs[1::2]) if interleaved else (pairs[:n], pairs[n:])
    values, partners = torch.zeros(1, size, dtype=torch.float64), torch.arange(size)[None].clone()
    values[0, first], values[0, second] = -frequencies.double(), frequencies.double()
    partners[0, first], partners[0, second] = second, first
    return KeyFrequencies(values, partners)
