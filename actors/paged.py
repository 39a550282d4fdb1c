"""Where a cartridge's tokens lie in vLLM's paged memory, and under which name. Pure: no vLLM.

A request over a cartridge of P tokens is sent as P placeholder ids and then its prompt. The blocks
of the placeholders are filled with the cartridge's keys and values instead of being computed:

    block_tokens 32, P 50, 8 prompt tokens, blocks (7, 3)
    positions      0 ............... 31 | 32 ...... 49 | 50 .. 57
    slots        224 ............. 255 | 96 ..... 113 | 114 .. 121
                  cartridge, shared     cartridge      prompt, computed

A block is shared among requests when all its tokens are equal, so a cartridge that ends inside a
block has a tail that every request fills for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocols.errors import PublishError

PLACEHOLDER = 0  # any id of the vocabulary: it is never embedded


@dataclass(frozen=True)
class Fill:
    """Tokens first .. stop-1 of one cartridge, to be written into a request's blocks."""

    name: str
    version: int
    first: int
    stop: int
    blocks: tuple[int, ...]


def slots(blocks: Sequence[int], block_tokens: int, first: int, stop: int) -> list[int]:
    """The slot of each position first .. stop-1 of a request that holds these blocks."""
    return [
        blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(first, stop)
    ]


def cache_salt(name: str, version: int, private_to: str = "") -> str:
    """What keeps blocks of different prefixes apart in the prefix cache.

    Blocks of one salt and equal tokens are shared. Placeholders are all equal, so the salt alone
    says whose keys they hold: cartridge and version, which together never change their meaning.
    `private_to` names a request that must share with nobody.
    """
    return f"{name}@{version}" + (f"#{private_to}" if private_to else "")


def kv_heads(heads: int, rank: int, ranks: int) -> slice:
    """Which of a model's key/value heads tensor-parallel rank `rank` of `ranks` holds.

    As vLLM lays them out: split evenly; with more ranks than heads, each head on several ranks in
    a row. `kv_heads(8, 1, 4)` is heads 2 and 3; `kv_heads(2, 1, 4)` is head 0.
    """
    if heads >= ranks:
        each = heads // ranks
        return slice(rank * each, (rank + 1) * each)
    head = rank * heads // ranks
    return slice(head, head + 1)


def check_shape(shape: Sequence[int], layers: int, heads: int, head_dim: int, names: int) -> None:
    """Raise PublishError unless [C, L, 2, H_kv, P, D] are `names` cartridges of this model."""
    expected = f"[{names}, {layers}, 2, {heads}, P, {head_dim}]"
    fits = len(shape) == 6 and [*shape[:4], shape[5]] == [names, layers, 2, heads, head_dim]
    if not fits or shape[4] < 1:
        raise PublishError(
            f"published keys and values are {list(shape)} and this generator's model takes "
            f"{expected}; train and sample with one model.path"
        )
