"""Compose prefixes, and build the one that the student reads: its document's cartridge, or several.

A sample over a composition is trained over the same ordered composition. Gradient flows only into
the cartridge of the sample's own document. The teacher reads that document alone: the cartridge
learns to be read beside others, not to read them.

In a composition each prefix is moved behind those before it. A rotary embedding rotates pairs of a
key's numbers by position x frequency, and rotations add up. Rotating a key at position p by the
angle of `by` therefore gives exactly the key at p + by. A score depends only on the distance
between query and key, so moving both changes no score; negative positions are valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from learning.cartridge.bank import CartridgeBank
from learning.decoder import KeyFrequencies, LanguageModel
from protocols.types import SEPARATOR, Sample


def prefix_name(sample: Sample) -> str:
    """Return the cartridge that learns, then the composition in order: "a", or "a\\nb\\na" for
    [b, a]."""
    return SEPARATOR.join((sample.cartridge, *sample.composed))


def prefix_lengths(samples: Iterable[Sample], alone: Mapping[str, int]) -> dict[str, int]:
    """Return the tokens of every prefix that the samples name, and of each cartridge alone."""
    of_samples = {
        prefix_name(s): sum(alone[name] for name in s.composed) for s in samples if s.composed
    }
    return {**alone, **of_samples}


def student_prefixes(
    model: LanguageModel, bank: CartridgeBank, names: Sequence[str]
) -> list[Tensor]:
    """Return the KV [L, 2, H_kv, P_c, D] of each named prefix. Gradient flows into the cartridges
    that learn."""
    if not any(SEPARATOR in name for name in names):
        return bank.kv(names)
    own = {name: name.split(SEPARATOR)[0] for name in names}
    found = []
    for name in names:
        order = name.split(SEPARATOR)[1:] or [own[name]]
        parts = bank.kv(order)
        learns = [
            part if one == own[name] else part.detach()
            for one, part in zip(order, parts, strict=True)
        ]
        found.append(composed(model, learns))
    return found


def composed(model: LanguageModel, prefixes: Sequence[Tensor]) -> Tensor:
    """Return an ordered composition [L, 2, H_kv, P_1 + ... + P_n, D] of prefixes
    [L, 2, H_kv, P_i, D] that each begin at position 0: each is moved behind those before it. The
    texts do not attend to one another. Raises DataError as `LanguageModel.frequencies` does."""
    first, *others = prefixes
    if not others:
        return first
    of_model = model.frequencies()
    parts, start = [first], first.shape[3]
    for prefix in others:
        parts.append(shifted(prefix, start, of_model))
        start += prefix.shape[3]
    return torch.cat(parts, dim=3)


def shifted(kv: Tensor, by: int, frequencies: KeyFrequencies) -> Tensor:
    """Return keys and values [L, 2, H_kv, P, D] with the keys moved by `by` positions."""
    if by == 0:
        return kv
    keys, values = kv.double().unbind(1)
    return torch.stack([frequencies.turned(keys, by), values], dim=1).to(kv.dtype)
