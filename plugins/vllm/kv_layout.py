"""Lay out cartridges' tokens in vLLM's paged memory, and name their blocks. Imports no vLLM.

A request over a cartridge of P tokens is sent as P placeholder ids and then its prompt. The blocks
of the placeholders are filled with the cartridge's keys and values instead of being computed:

    block_tokens 32, P 50, 8 prompt tokens, blocks (7, 3)
    positions      0 ............... 31 | 32 ...... 49 | 50 .. 57
    slots        224 ............. 255 | 96 ..... 113 | 114 .. 121
                  cartridge, shared     cartridge      prompt, computed

Requests share a block when all its tokens are equal, so every request fills the last, partial block
of a cartridge for itself. A composition is filled like one cartridge of all its tokens: [a, b] of
50 and 30 takes positions 0 .. 49 and 50 .. 79, and b's keys are rotated by 50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from cartridge_forge.learning.cartridge import CartridgeId
from cartridge_forge.protocols.errors import DataError, PublishError
from cartridge_forge.protocols.step import CARTRIDGE, PrefixRef

PLACEHOLDER = 0  # any id of the vocabulary, because it is never embedded


@dataclass(frozen=True)
class PromptCartridge:
    """Describe one of the cartridges before a prompt, `tokens` long, with its numbers since the
    version `since`."""

    name: str
    since: int
    tokens: int


@dataclass(frozen=True)
class KVFill:
    """Describe positions first .. stop-1 of concatenated cartridges, to be written to `blocks`."""

    parts: tuple[PromptCartridge, ...]
    first: int
    stop: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class CartridgeSlice:
    """Describe tokens first .. stop-1 of one cartridge, whose token 0 has position `start`."""

    part: PromptCartridge
    start: int
    first: int
    stop: int


def cartridges_of(
    request: str, prefix: PrefixRef, tokens: Mapping[CartridgeId, int]
) -> tuple[PromptCartridge, ...]:
    """Return the cartridges of a request's prefix as it is held, in order; () for a document.
    `tokens` maps a cartridge to P. Raises DataError, with the id of the `request`, for a document
    that is composed with others."""
    refs = prefix.parts
    documents = [ref.name for ref in refs if not ref.name.startswith(CARTRIDGE)]
    if documents and len(refs) > 1:
        raise DataError(
            f"request {request} composes {documents[0]} with other prefixes: vLLM computes a "
            "document as tokens, which would see the cartridges before it, and loads cartridges "
            "only before all tokens; compose cartridges alone, or use generator.backend torch"
        )
    if documents:
        return ()
    keys = [(ref.name.removeprefix(CARTRIDGE), ref.version) for ref in refs]
    return tuple(PromptCartridge(*key, tokens[key]) for key in keys)


def pieces(parts: Sequence[PromptCartridge], first: int, stop: int) -> list[CartridgeSlice]:
    """Return the slices of the cartridges at positions first .. stop-1 of their concatenation;
    cartridges outside are left out."""
    slices, start = [], 0
    for part in parts:
        begin, end = max(first - start, 0), min(stop - start, part.tokens)
        if begin < end:
            slices.append(CartridgeSlice(part, start, begin, end))
        start += part.tokens
    return slices


def slots(blocks: Sequence[int], block_tokens: int, first: int, stop: int) -> list[int]:
    """Return the slot of each position first .. stop-1 of a request that holds these blocks."""
    return [
        blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(first, stop)
    ]


def cache_salt(parts: Sequence[PromptCartridge], private_to: str = "") -> str:
    """Return the salt that separates blocks of different prefixes in the prefix cache: "a@7",
    "a@7,b@7".

    Requests share blocks with the same salt and equal tokens. Placeholders are all equal, so the
    salt alone identifies their keys: by cartridges in their order, each with the version that last
    changed it. So versions share the blocks of a cartridge that did not change, and a salt never
    changes its meaning. `private_to` names a request that must share with no other.
    """
    # Quoted, so that no name contains a separator.
    salt = ",".join(f"{quote(part.name, safe='')}@{part.since}" for part in parts)
    return salt + (f"#{private_to}" if private_to else "")


def kv_heads(heads: int, rank: int, ranks: int) -> slice:
    """Return the key/value heads that tensor-parallel rank `rank` of `ranks` holds.

    The layout is vLLM's: split evenly; with more ranks than heads, each head on several ranks in a
    row. `kv_heads(8, 1, 4)` is heads 2 and 3; `kv_heads(2, 1, 4)` is head 0.
    """
    if heads >= ranks:
        count = heads // ranks
        return slice(rank * count, (rank + 1) * count)
    head = rank * heads // ranks
    return slice(head, head + 1)


def check_shape(name: str, shape: Sequence[int], layers: int, heads: int, head_dim: int) -> None:
    """Raise PublishError unless [L, 2, H_kv, P, D] is a cartridge of this model."""
    fits = len(shape) == 5 and [*shape[:3], shape[4]] == [layers, 2, heads, head_dim]
    if not fits or shape[3] < 1:
        raise PublishError(
            f"keys and values of cartridge {name} are {list(shape)} and this generator's model "
            f"takes [{layers}, 2, {heads}, P, {head_dim}]; train and sample with one model.path"
        )
