"""Begin cartridges in other ways than with the document's first tokens, and pad trained ones.

    random_text         random tokens of the vocabulary
    random_vectors      normal numbers with the mean and spread of the document's KV
    sampled_chunks      chunks of the document, read one after another (Diaz, arXiv 2508.17032)
    attention_matching  the whole document's KV, compacted in closed form, by what the model reads
                        and writes behind it (plugins.library.attention_matching)

All but attention_matching compute the keys at positions 0..P-1, behind the first `frozen` tokens of
the document: random text would be no attention sink. A trained cartridge of fewer than P tokens
gets more of the document: random vectors, or entries that attention matching fits beside its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.initialization import CartridgeInit, InitSource, beginning
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.attention_matching import attention_added, attention_matched
from cartridge_forge.plugins.library.reference_rows import NO_STUDY, StudyPrompts
from cartridge_forge.protocols.step import stream_seed

CHUNKS = 8  # at most, and so few that each has LEAST tokens
LEAST = 4


def study_prompts(source: InitSource, seed: int) -> StudyPrompts:
    """Return the prompts about a source's text, drawn by this seed and the source's name."""
    if source.study is None:
        return NO_STUDY
    prompts: StudyPrompts = source.study(source.ids, f"init/study/{seed}/{source.name}")
    return prompts


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
    kv, study = source.whole(), study_prompts(source, start.seed)
    return attention_matched(model, source.ids, kv, start.tokens, start.frozen, study)


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
    text_kv, study = source.whole(), study_prompts(source, start.seed)
    return attention_added(model, source.ids, text_kv, kv, start.tokens - kv.shape[3], study)


PADS: Mapping[str, Callable[[LanguageModel, InitSource, CartridgeInit, Tensor], Tensor]] = {
    "random": random_padding,
    "attention_matching": matched_padding,
}
