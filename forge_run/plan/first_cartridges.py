"""Make the cartridges of a user's documents as they are before the first step, in this process, and
say what they are worth.

    read -> model -> each cartridge by cartridge.init -> gain on held-out prompts

The gain needs no question: the prompts are made of the document's own phrases, by draws that
neither the start nor training sees, and the right answers are the words that follow there.

    gain = (loss without the document - loss over the cartridge)
         / (loss without the document - loss over the whole document)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from cartridge_forge.forge_run.plan.edited_cartridge import TOKENIZER, tokenizer_hash
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.initialization import untrained_bank
from cartridge_forge.learning.model.loading import base_hash, load_model, load_tokenizer
from cartridge_forge.learning.teacher import DocumentKVCache, document_kv, response_logprobs
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.corpus import Corpus, read_parts
from cartridge_forge.plugins.documents.edits import JOINED
from cartridge_forge.plugins.documents.retrieval import count_terms
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.plugins.documents.text_turns import text_turn
from cartridge_forge.plugins.library.formats.base_model import model_name, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import (
    CartridgeFile,
    Provenance,
    source_of,
)
from cartridge_forge.plugins.library.terms import Passages
from cartridge_forge.protocols.step import NO_DOCUMENT, Sample

HELD_OUT = 16  # prompts about a cartridge's documents
KINDS = ("continue", "cloze")
CACHE_BYTES = 2**30  # of a document between its start and its gain; a longer one is read twice
LEAST_GAP = 0.05  # nats a token: of a smaller gap a share says nothing


@dataclass(frozen=True)
class FirstCartridge:
    """Hold a cartridge, one of `count`, with its text, the words of its passages, and the share of
    the document's gain that it has; None where the document itself has none on the prompts."""

    name: str
    count: int
    file: CartridgeFile
    text: str
    passages: Passages
    gain: float | None


def first_cartridges(
    learn: DocumentsLearn, show: Callable[[int, int, str], None], read: Callable[[Corpus], None]
) -> Iterator[FirstCartridge]:
    """Yield the cartridges of the spec's documents as `cartridge.init` makes them, one after
    another; `read` is told the documents, and `show` which cartridge is next. Raises DataError as
    reading and initializing do."""
    tokenizer = load_tokenizer(learn.model.path)
    corpus = read_parts(learn, tokenizer)
    read(corpus)
    renderer = ChatRenderer(tokenizer, corpus.texts, datetime.now())
    model = load_model(learn.model.path, learn.model.dtype)
    facts, hashed = _facts(learn, model), tokenizer_hash(tokenizer)
    documents = {name: renderer.head(name) for name in corpus.parts}
    documents[NO_DOCUMENT] = renderer.head(None)
    contexts = corpus.layout.contexts
    for at, (name, parts) in enumerate(sorted(contexts.items())):
        show(at, len(contexts), name)
        cache = DocumentKVCache(partial(document_kv, model), documents, CACHE_BYTES)
        bank = untrained_bank(model, learn, learn.model.path, {name: parts}, documents, cache)
        kv = bank.kv([name])[0].detach()
        source = {"name": name, "init": learn.cartridge.fresh, "step": 0, TOKENIZER: hashed}
        file = CartridgeFile(kv.cpu(), learn.cartridge.frozen_tokens, facts)
        yield FirstCartridge(
            name,
            len(contexts),
            file.with_source(source | source_of(renderer.date)),
            JOINED.join(corpus.texts[part] for part in parts),
            [count_terms(corpus.texts[part]) for part in parts],
            gain_of(model, renderer, corpus, parts, kv, cache),
        )


def gain_of(
    model: LanguageModel, renderer: ChatRenderer, corpus: Corpus, parts: Sequence[str], kv: Tensor,
    cache: DocumentKVCache,
) -> float | None:  # fmt: skip
    """Return the share of the document's gain that a cartridge [L, 2, H_kv, P, D] of these contexts
    has on held-out prompts, None where they tell none. Prompts are about the first context, and the
    last, of a cartridge of many."""
    samples: list[tuple[str, Sample, Sample]] = []
    for part in dict.fromkeys((parts[0], parts[-1])):
        rng = random.Random(f"make/gain/{part}")
        for i in range(HELD_OUT):
            turn = text_turn(KINDS[i % len(KINDS)], corpus.texts[part], rng)
            if turn is not None:
                message, answer = (AgentMessage("user", turn.turn),), renderer.saying(turn.answer)
                with_document, bare = (
                    Sample(str(i), "", renderer.opening(about, message), answer, (), ())
                    for about in (part, None)
                )
                samples.append((part, with_document, bare))
    if not samples:
        return None

    def loss(part: str, arm: str) -> list[float]:
        read = [
            bare if arm == "none" else with_document
            for one, with_document, bare in samples
            if one == part
        ]
        prefix = kv if arm == "cartridge" else cache.get(NO_DOCUMENT if arm == "none" else part)
        most = max(len(s.prompt_ids) + len(s.response_ids) for s in read)
        logprobs = response_logprobs(model, read, {"": prefix.to(model.dtype)}, most)
        of_answers = torch.split(logprobs, [len(s.response_ids) for s in read])
        return [-one.mean().item() for one in of_answers]

    about = dict.fromkeys(part for part, _, _ in samples)
    none, cartridge, document = (
        fmean(value for part in about for value in loss(part, arm))
        for arm in ("none", "cartridge", "document")
    )
    return (none - cartridge) / (none - document) if none - document > LEAST_GAP else None


def _facts(learn: DocumentsLearn, model: LanguageModel) -> Provenance:
    """Return what a cartridge keeps of its model."""
    name, dtype = model_name(learn.model.path), learn.model.dtype
    base = read_base(Path(learn.model.path))
    return Provenance(name, base.config_sha256, base_hash(model), dtype, base.rope)


def gain_text(gains: Sequence[float | None]) -> str:
    """Return the mean gain in words."""
    told_gains = [gain for gain in gains if gain is not None]
    if not told_gains:
        return "usable now (the prompts tell no gain of the document)"
    return f"usable now: about {max(0, round(100 * fmean(told_gains)))}% of the document's gain"
