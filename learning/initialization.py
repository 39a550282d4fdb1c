"""Initialize cartridges [L, 2, H_kv, P, D] from documents, or from trained cartridges.

    first_tokens        the document's first P tokens; of several contexts, an equal share of each
    random_text         random tokens of the vocabulary
    random_vectors      normal numbers with the mean and spread of the document's KV
    sampled_chunks      chunks of the document, read one after another (Diaz, arXiv 2508.17032)
    attention_matching  the whole document's KV, compacted in closed form, by what the model reads
                        and writes behind it (plugins.library.attention_matching)

All but attention_matching compute the keys at positions 0..P-1. The first `frozen` tokens are
always the document's own: they are the attention sink, which is not trained, and random text would
not be one.

A trained cartridge of other than P tokens is cut to its first P, or gets more of the document:
random vectors, or entries that attention matching fits beside its own (PADS).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeBank, check_longer, shifted
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import text_ids
from cartridge_forge.learning.teacher import DocumentKVCache, context_ids, document_kv
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import optional, resolve
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import SEPARATOR, set_preparation, stream_seed

CHUNKS = 8  # at most, and so few that each has LEAST tokens
LEAST = 4


@dataclass(frozen=True)
class StudyPrompts:
    """Hold the token ids of `prompts` about a document, behind its own, and the ids that end an
    answer; and of prompts with their answers, which are the document's own words: `recited`."""

    prompts: tuple[tuple[int, ...], ...] = ()
    end_ids: frozenset[int] = frozenset()
    recited: tuple[tuple[int, ...], ...] = ()


NO_STUDY = StudyPrompts()


def no_study(ids: Sequence[int], stream: str) -> StudyPrompts:
    """Return no prompts, as where nothing makes them of a document's tokens `ids`."""
    return NO_STUDY


@dataclass(frozen=True)
class InitSource:
    """Describe what a cartridge learns from: a text's token ids [T], a call that returns its KV
    [L, 2, H_kv, T, D], and one that returns the ids that stand for text. Where several contexts
    make up the text, `parts` are the ids that each of them has of it. The model reads at most
    `most` tokens of them at once. `study` makes prompts about the text, by the name of a stream of
    draws."""

    name: str
    ids: tuple[int, ...]
    kv: Callable[[], Tensor]
    vocabulary: Callable[[], Sequence[int]]
    parts: tuple[tuple[int, ...], ...] = ()
    most: int | None = None
    study: Callable[[Sequence[int], str], StudyPrompts] = no_study

    def study_prompts(self, seed: int) -> StudyPrompts:
        """Return the prompts about the text, drawn by this seed and the source's name."""
        return self.study(self.ids, f"init/study/{seed}/{self.name}")

    def check_read(self) -> None:
        """Raise DataError where several contexts have more tokens than the model reads at once."""
        if self.most is not None and self.parts and len(self.ids) > self.most:
            raise DataError(
                f"cartridge {self.name} learns from {len(self.ids):,} tokens, and the model reads "
                f"{self.most:,} at once: set cartridge.init to first_tokens, random_text or "
                "sampled_chunks, which do not read all of them"
            )

    def whole(self) -> Tensor:
        """Return the KV of all of the text. Raises DataError as `check_read` does."""
        self.check_read()
        return self.kv()


@dataclass(frozen=True)
class CartridgeInit:
    """Name one of INITS, the cartridge's P tokens, how many of them are frozen, and the seed of the
    draws. `pad` is one of PADS, for trained cartridges of fewer tokens."""

    init: str
    tokens: int
    frozen: int
    seed: int = 0
    pad: str | None = None


Start = tuple[Tensor, int]
"""A cartridge before its first step: [L, 2, H_kv, P, D] in float32, and its frozen tokens."""


def initial_cartridges(
    model: LanguageModel,
    sources: Iterable[InitSource],
    start: CartridgeInit,
    starts: Mapping[str, Start],
) -> dict[str, Start]:
    """Return every cartridge at its start, by name: the `given` ones and those of `sources`. A
    given cartridge of fewer than P tokens is padded from the source of its name.

    Raises DataError for a document that is not longer than a cartridge made of it.
    """
    by_name = {source.name: source for source in sources}
    cartridges = {}
    names = sorted({*by_name, *starts})
    for count, name in enumerate(names):
        set_preparation(count, len(names))
        source = by_name.get(name)
        if source is not None:
            check_longer(name, len(source.ids), start.tokens)
        if name in starts:
            kv, frozen = starts[name]
            cartridges[name] = resized(model, source, start, kv, frozen), frozen
        else:
            assert source is not None
            cartridges[name] = INITS[start.init](model, source, start).float(), start.frozen
    set_preparation(len(names), len(names))
    return cartridges


def initial_bank(
    model: LanguageModel,
    sources: Iterable[InitSource],
    start: CartridgeInit,
    starts: Mapping[str, Start] | None = None,
) -> CartridgeBank:
    """Return a bank of `initial_cartridges`. Raises DataError as that does, and where cartridges
    differ in frozen tokens."""
    cartridges = initial_cartridges(model, sources, start, starts or {})
    counts = {frozen: name for name, (_, frozen) in cartridges.items()}
    if len(counts) > 1:
        listing = ", ".join(f"{name} {frozen}" for frozen, name in sorted(counts.items()))
        raise DataError(
            f"the cartridges of a run have equally many frozen tokens: got {listing}; start from "
            "files that agree, and set cartridge.frozen to their number"
        )
    return CartridgeBank(list(cartridges), [kv for kv, _ in cartridges.values()], *counts)


def resized(
    model: LanguageModel, source: InitSource | None, start: CartridgeInit, kv: Tensor, frozen: int
) -> Tensor:
    """Return a trained cartridge [L, 2, H_kv, G, D] with P tokens, in float32: its first, or with
    tokens of the document `source` behind its own.

    The frozen tokens do not change. The keys of the others are moved by P - G, so that a prompt is
    as far behind them as in training.
    """
    kv = kv.to(model.device, torch.float32)
    if (missing := start.tokens - kv.shape[3]) == 0:
        return kv
    sink, learned = kv[:, :, :, : start.tokens].tensor_split([frozen], dim=3)
    joined = torch.cat([sink, shifted(learned, missing, model.frequencies())], dim=3)
    if missing < 0:
        return joined
    assert start.pad is not None, "refused before the cartridge was read"
    assert source is not None, "a padded cartridge has its document"
    return torch.cat([joined, PADS[start.pad](model, source, start, joined).float()], dim=3)


def beginning(model: LanguageModel, source: InitSource, start: CartridgeInit) -> Tensor:
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
    counts, remaining = [0] * len(lengths), tokens
    shortest = sorted(range(len(lengths)), key=lambda i: (lengths[i], -i))
    for rank, i in enumerate(shortest):
        counts[i] = min(lengths[i], remaining // (len(lengths) - rank))
        remaining -= counts[i]
    return counts


def random_text(model: LanguageModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the KV of tokens drawn uniformly from the vocabulary, read after the frozen ones."""
    rng = random.Random(f"init/random_text/{start.seed}/{source.name}")
    drawn = rng.choices(source.vocabulary(), k=start.tokens - start.frozen)
    return document_kv(model, (*source.ids[: start.frozen], *drawn))


def random_vectors(model: LanguageModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return independent normal numbers after the frozen tokens. Mean and standard deviation are
    those of the document's tokens after the frozen ones, for each layer, head and channel, keys and
    values apart."""
    kv = source.whole()
    drawn = _drawn(source, kv, start, start.frozen, "random_vectors")
    return torch.cat([kv[:, :, :, : start.frozen], drawn], dim=3)


def _drawn(
    source: InitSource, source_kv: Tensor, start: CartridgeInit, sinks: int, stream: str
) -> Tensor:
    """Draw P - `beside` vectors like those of the document, `whole`, behind its frozen tokens."""
    kv = source_kv[:, :, :, start.frozen :].float()
    size = (*kv.shape[:3], start.tokens - sinks, kv.shape[4])
    draws = torch.Generator().manual_seed(stream_seed(f"init/{stream}/{start.seed}/{source.name}"))
    noise = torch.randn(size, generator=draws).to(kv.device)
    drawn = kv.mean(3, keepdim=True) + kv.std(3, keepdim=True) * noise
    return drawn.to(source_kv.dtype)


def sampled_chunks(model: LanguageModel, source: InitSource, start: CartridgeInit) -> Tensor:
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
    for i, (start, size) in enumerate(zip(places, sizes, strict=True)):
        first = start - i + used
        spans.append(range(first, first + size))
        used += size
    return spans


def matched(model: LanguageModel, source: InitSource, start: CartridgeInit) -> Tensor:
    """Return the document's KV compacted to P entries by attention matching."""
    attention_matched = resolve("hooks", "attention_matching")
    kv = source.whole()
    compacted: Tensor = attention_matched(
        model, source.ids, kv, start.tokens, start.frozen, source.study_prompts(start.seed)
    )
    return compacted


INITS: Mapping[str, Callable[[LanguageModel, InitSource, CartridgeInit], Tensor]] = {
    "first_tokens": beginning,
    "random_text": random_text,
    "random_vectors": random_vectors,
    "sampled_chunks": sampled_chunks,
    "attention_matching": matched,
}


def random_padding(
    model: LanguageModel, source: InitSource, start: CartridgeInit, kv: Tensor
) -> Tensor:
    """Return random vectors [L, 2, H_kv, P - G, D] like the document's KV."""
    return _drawn(source, source.whole(), start, kv.shape[3], "pad")


def matched_padding(
    model: LanguageModel, source: InitSource, start: CartridgeInit, kv: Tensor
) -> Tensor:
    """Return entries [L, 2, H_kv, P - G, D] of the document, fitted beside the cartridge `kv` by
    attention matching."""
    attention_added = resolve("hooks", "attention_padding")
    added: Tensor = attention_added(
        model, source.ids, source.whole(), kv, start.tokens - kv.shape[3],
        source.study_prompts(start.seed),
    )  # fmt: skip
    return added


PADS: Mapping[str, Callable[[LanguageModel, InitSource, CartridgeInit, Tensor], Tensor]] = {
    "random": random_padding,
    "attention_matching": matched_padding,
}


def untrained_bank(
    model: LanguageModel,
    learn: LearnSpec,
    path: str,
    cartridges: Mapping[str, tuple[str, ...]],
    documents: Mapping[str, tuple[int, ...]],
    cache: DocumentKVCache,
    starts: Mapping[str, Start] | None = None,
) -> CartridgeBank:
    """Return the bank of `cartridges`, which map to their contexts in `documents`, as
    `learn.cartridge` starts them, and of `starts`, trained ones. The tokenizer is at `path`. Raises
    DataError as `initial_bank` does."""
    spec = learn.cartridge
    prompts_of = optional("hooks", "study_prompts")
    study = no_study if prompts_of is None else partial(prompts_of, path)
    vocabulary = partial(text_ids, path)
    sources = init_sources(cartridges, documents, cache, model.longest, vocabulary, study)
    start = CartridgeInit(
        spec.fresh or "first_tokens",  # of no cartridge, where every one is given
        spec.tokens,
        spec.frozen_tokens,
        learn.train.seed,
        spec.start.pad if spec.start is not None else None,
    )
    return initial_bank(model, sources, start, starts or {})


def init_sources(
    cartridges: Mapping[str, tuple[str, ...]],
    documents: Mapping[str, tuple[int, ...]],
    cache: DocumentKVCache,
    most: int | None,
    vocabulary: Callable[[], Sequence[int]],
    study: Callable[[Sequence[int], str], StudyPrompts] = no_study,
) -> list[InitSource]:
    """Return a source for each of `cartridges`, which map to their contexts in `documents`.

    Several contexts are one text; its KV is read only by an initialization that asks for it. The
    model's context is `most` tokens.
    """
    return [
        InitSource(
            name,
            context_ids(documents, SEPARATOR.join(contexts)),
            partial(cache.get, SEPARATOR.join(contexts)),
            vocabulary,
            parts_of(contexts, documents) if len(contexts) > 1 else (),
            most,
            study,
        )
        for name, contexts in cartridges.items()
    ]


def parts_of(
    contexts: Sequence[str], documents: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids that each context has of their one text."""
    begin = len(documents.get("none", ()))
    return tuple(documents[c][begin if i else 0 :] for i, c in enumerate(contexts))
