"""Initialize cartridges [L, 2, H_kv, P, D] from documents.

    first_tokens        the document's first P tokens; of several contexts, an equal share of each
    random_text         random tokens of the vocabulary
    random_vectors      normal numbers with the mean and spread of the document's KV
    sampled_chunks      chunks of the document, read one after another (Diaz, arXiv 2508.17032)
    attention_matching  the whole document's KV, compacted in closed form
                        (learning.cartridge.attention_matching)

All but attention_matching compute the keys at positions 0..P-1. The first `frozen` tokens are
always the document's own: they are the attention sink, which is not trained, and random text would
not be one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learning.cartridge.attention_matching import attention_matched
from learning.cartridge.bank import CartridgeBank, check_longer
from learning.model.document_kv import document_kv
from protocols.seeds import stream_seed

CHUNKS = 8  # at most, and so few that each has LEAST tokens
LEAST = 4


@dataclass(frozen=True)
class InitSource:
    """Describe what a cartridge learns from: a text's token ids [T], a call that returns its KV
    [L, 2, H_kv, T, D], and one that returns the ids that stand for text. Where several contexts
    make up the text, `parts` are the ids that each of them has of it."""

    name: str
    ids: tuple[int, ...]
    kv: Callable[[], Tensor]
    vocabulary: Callable[[], Sequence[int]]
    parts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class CartridgeInit:
    """Name one of INITS, the cartridge's P tokens, how many of them are frozen, and the seed of the
    draws."""

    init: str
    tokens: int
    frozen: int
    seed: int = 0


def initial_bank(
    model: PreTrainedModel, sources: Sequence[InitSource], start: CartridgeInit
) -> CartridgeBank:
    """Return a bank with a cartridge of each document. Raises DataError for a document that is not
    longer than a cartridge."""
    for source in sources:
        check_longer(source.name, len(source.ids), start.tokens)
    ordered = sorted(sources, key=lambda source: source.name)
    made = [INITS[start.init](model, source, start) for source in ordered]
    return CartridgeBank([source.name for source in ordered], torch.stack(made), start.frozen)


def beginning(model: PreTrainedModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the KV of the document's first P tokens, which the cartridge paper found best. Of
    several contexts, these are the first tokens of each, read as one text."""
    if not source.parts:
        return source.kv()[:, :, :, : start.tokens]
    return document_kv(model, first_of_each(source.parts, start.tokens))


def first_of_each(parts: Sequence[Sequence[int]], tokens: int) -> list[int]:
    """Return the first tokens of each part, `tokens` in all, by `shares`."""
    counts = shares([len(part) for part in parts], tokens)
    return [id for part, n in zip(parts, counts, strict=True) for id in part[:n]]


def shares(lengths: Sequence[int], tokens: int) -> list[int]:
    """Divide `tokens` equally over texts of these lengths. What a shorter text leaves over, or is
    not divisible, goes to the longer ones, of equal ones to the first. Raises ValueError for more
    tokens than the texts have."""
    if tokens > sum(lengths):
        raise ValueError(f"texts of {sum(lengths)} tokens have no first {tokens}")
    found, left = [0] * len(lengths), tokens
    shortest = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    for place, i in enumerate(shortest):
        found[i] = min(lengths[i], left // (len(lengths) - place))
        left -= found[i]
    return found


def random_text(model: PreTrainedModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the KV of tokens drawn uniformly from the vocabulary, read after the frozen ones."""
    rng = random.Random(f"init/random_text/{start.seed}/{source.name}")
    drawn = rng.choices(source.vocabulary(), k=start.tokens - start.frozen)
    return document_kv(model, (*source.ids[: start.frozen], *drawn))


def random_vectors(model: PreTrainedModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return independent normal numbers after the frozen tokens. Mean and standard deviation are
    those of the document's tokens after the frozen ones, for each layer, head and channel, keys and
    values apart."""
    whole = source.kv()
    kv = whole[:, :, :, start.frozen :].float()
    size = (*kv.shape[:3], start.tokens - start.frozen, kv.shape[4])
    draws = torch.Generator().manual_seed(
        stream_seed(f"init/random_vectors/{start.seed}/{source.name}")
    )
    noise = torch.randn(size, generator=draws).to(kv.device)
    drawn = kv.mean(3, keepdim=True) + kv.std(3, keepdim=True) * noise
    return torch.cat([whole[:, :, :, : start.frozen], drawn.to(whole.dtype)], dim=3)


def sampled_chunks(model: PreTrainedModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the KV of CHUNKS chunks of about equal length, drawn uniformly without overlap, in the
    document's order, read after the frozen tokens as one text."""
    rng = random.Random(f"init/sampled_chunks/{start.seed}/{source.name}")
    body = source.ids[start.frozen :]
    drawn = [i for span in chunks(len(body), start.tokens - start.frozen, rng) for i in span]
    return document_kv(model, (*source.ids[: start.frozen], *(body[i] for i in drawn)))


def chunks(length: int, tokens: int, rng: random.Random) -> list[range]:
    """Draw spans of 0..length without overlap, `tokens` long together. Every way to leave gaps
    between them is equally likely."""
    count = max(1, min(CHUNKS, tokens // LEAST))
    sizes = [tokens // count + (i < tokens % count) for i in range(count)]
    left_out = length - tokens
    # The slots are gap tokens and chunks, in order: draw which of them are chunks.
    places = sorted(rng.sample(range(left_out + count), count))
    spans, used = [], 0
    for i, (place, size) in enumerate(zip(places, sizes, strict=True)):
        first = place - i + used
        spans.append(range(first, first + size))
        used += size
    return spans


def matched(model: PreTrainedModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the document's KV compacted to P entries by attention matching."""
    return attention_matched(model, source.ids, source.kv(), start.tokens, start.frozen)


INITS: Mapping[str, Callable[[PreTrainedModel, InitSource, CartridgeInit], Tensor]] = {
    "first_tokens": beginning,
    "random_text": random_text,
    "random_vectors": random_vectors,
    "sampled_chunks": sampled_chunks,
    "attention_matching": matched,
}
