"""Where cartridges' tokens lie in vLLM's paged memory, and under which name. Pure: no vLLM.

A request over a cartridge of P tokens is sent as P placeholder ids and then its prompt. The blocks
of the placeholders are filled with the cartridge's keys and values instead of being computed:

    block_tokens 32, P 50, 8 prompt tokens, blocks (7, 3)
    positions      0 ............... 31 | 32 ...... 49 | 50 .. 57
    slots        224 ............. 255 | 96 ..... 113 | 114 .. 121
                  cartridge, shared     cartridge      prompt, computed

A block is shared among requests when all its tokens are equal, so a cartridge that ends inside a
block has a tail that every request fills for itself. A composition is filled as one cartridge of
all its tokens would be: [a, b] of 50 and 30 takes positions 0 .. 49 and 50 .. 79, and b's keys are
turned by 50.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from actors.engine_thread import CARTRIDGE
from protocols.errors import DataError, PublishError
from protocols.types import GenerateRequest

PLACEHOLDER = 0  # any id of the vocabulary: it is never embedded


@dataclass(frozen=True)
class PromptCartridge:
    """One of the cartridges before a prompt, `tokens` long."""

    name: str
    version: int
    tokens: int


@dataclass(frozen=True)
class KVFill:
    """Positions first .. stop-1 of the cartridges laid end to end, to be written into a request's
    blocks."""

    parts: tuple[PromptCartridge, ...]
    first: int
    stop: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class CartridgeSlice:
    """Tokens first .. stop-1 of one cartridge, whose token 0 stands at position `start`."""

    part: PromptCartridge
    start: int
    first: int
    stop: int


def cartridges_of(
    request: GenerateRequest, tokens: Mapping[int, int]
) -> tuple[PromptCartridge, ...]:
    """The cartridges before a request's prompt, in order; none where a document is its prefix.
    `tokens` is every version's P. Raises DataError for a document that is composed with others."""
    refs = request.prefix.parts
    documents = [ref.name for ref in refs if not ref.name.startswith(CARTRIDGE)]
    if documents and len(refs) > 1:
        raise DataError(
            f"request {request.id} composes {documents[0]} with other prefixes: vLLM computes a "
            "document as tokens, which would see the cartridges before it, and loads cartridges "
            "only before all tokens; compose cartridges alone, or use generator.backend torch"
        )
    if documents:
        return ()
    return tuple(
        PromptCartridge(ref.name.removeprefix(CARTRIDGE), ref.version, tokens[ref.version])
        for ref in refs
    )


def pieces(parts: Sequence[PromptCartridge], first: int, stop: int) -> list[CartridgeSlice]:
    """What of each cartridge lies at positions first .. stop-1 of all laid end to end; those of
    which nothing does are left out."""
    found, start = [], 0
    for part in parts:
        begin, end = max(first - start, 0), min(stop - start, part.tokens)
        if begin < end:
            found.append(CartridgeSlice(part, start, begin, end))
        start += part.tokens
    return found


def slots(blocks: Sequence[int], block_tokens: int, first: int, stop: int) -> list[int]:
    """The slot of each position first .. stop-1 of a request that holds these blocks."""
    return [
        blocks[at // block_tokens] * block_tokens + at % block_tokens for at in range(first, stop)
    ]


def cache_salt(parts: Sequence[PromptCartridge], private_to: str = "") -> str:
    """What keeps blocks of different prefixes apart in the prefix cache: "a@7", "a@7,b@7".

    Blocks of one salt and equal tokens are shared. Placeholders are all equal, so the salt alone
    says whose keys they hold: cartridges and versions in their order, which together never change
    their meaning. `private_to` names a request that must share with nobody.
    """
    # Quoted, so that no name can hold what stands between names.
    salt = ",".join(f"{quote(part.name, safe='')}@{part.version}" for part in parts)
    return salt + (f"#{private_to}" if private_to else "")


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
