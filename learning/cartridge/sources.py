"""Describe what a run's cartridges start from: the text of the contexts that each learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import Tensor

from learning.cartridge.initialization import InitSource
from learning.model.document_kv import DocumentKVCache, context_ids
from protocols.errors import DataError
from protocols.types import SEPARATOR


def init_sources(
    cartridges: Mapping[str, tuple[str, ...]],
    documents: Mapping[str, tuple[int, ...]],
    cache: DocumentKVCache,
    most: int | None,
    vocabulary: Callable[[], Sequence[int]],
) -> list[InitSource]:
    """Return a source for each of `cartridges`, which map to their contexts in `documents`.

    Several contexts are one text; its KV is read only by an initialization that asks for it. Then
    DataError is raised for a text of more than `most` tokens, the model's context.
    """
    return [
        InitSource(
            name,
            context_ids(documents, SEPARATOR.join(contexts)),
            partial(_kv, name, contexts, documents, cache, most),
            vocabulary,
            parts_of(contexts, documents) if len(contexts) > 1 else (),
        )
        for name, contexts in cartridges.items()
    ]


def _kv(
    name: str,
    contexts: Sequence[str],
    documents: Mapping[str, tuple[int, ...]],
    cache: DocumentKVCache,
    most: int | None,
) -> Tensor:
    joined = SEPARATOR.join(contexts)
    tokens = len(context_ids(documents, joined))
    if most is not None and len(contexts) > 1 and tokens > most:
        raise DataError(
            f"cartridge {name} learns from {tokens:,} tokens, and the model reads {most:,} at "
            "once: set cartridge.init to first_tokens, random_text or sampled_chunks, which do not "
            "read all of them"
        )
    return cache.get(joined)


def parts_of(
    contexts: Sequence[str], documents: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids that each context has of their one text."""
    begin = len(documents.get("none", ()))
    return tuple(documents[c][begin if i else 0 :] for i, c in enumerate(contexts))
