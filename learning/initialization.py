"""Initialize cartridges [L, 2, H_kv, P, D] from documents, or from trained cartridges.

By default a cartridge begins as the document's first P tokens; of several contexts, as an equal
share of each. The plug-in `library` has the other ways (`plugins.library.starts.untrained`), and
what is added to a trained cartridge of fewer than P tokens; one of more is cut to its first P.
The first `frozen` tokens are always the document's own: they are the attention sink, which is not
trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeBank, check_longer, shifted
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import text_ids
from cartridge_forge.learning.teacher import DocumentKVCache, context_ids, document_kv
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import optional, resolve
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import SEPARATOR, set_preparation

FIRST_TOKENS = "first_tokens"
Study = Callable[[Sequence[int], str], Any]
"""Make prompts about a text, of its ids and the name of a stream of draws."""


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
    study: Study | None = None

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
    """Name how a cartridge begins, its P tokens, how many of them are frozen, and the seed of the
    draws. `pad` is what is added to trained cartridges of fewer tokens."""

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
            first = start.init == FIRST_TOKENS
            begin = beginning if first else resolve("hooks", "inits")[start.init]
            cartridges[name] = begin(model, source, start).float(), start.frozen
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
    padding = resolve("hooks", "pads")[start.pad](model, source, start, joined)
    return torch.cat([joined, padding.float()], dim=3)


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
    study = None if prompts_of is None else partial(prompts_of, path)
    vocabulary = partial(text_ids, path)
    sources = init_sources(cartridges, documents, cache, model.longest, vocabulary, study)
    start = CartridgeInit(
        spec.fresh or FIRST_TOKENS,  # of no cartridge, where every one is given
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
    study: Study | None = None,
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
