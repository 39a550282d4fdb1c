"""Describe what a run's cartridges start from: the text of the contexts that each learns from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from learning.cartridge.initialization import InitSource
from learning.model.document_kv import DocumentKVCache, context_ids
from protocols.types import SEPARATOR


def init_sources(
    cartridges: Mapping[str, tuple[str, ...]],
    documents: Mapping[str, tuple[int, ...]],
    cache: DocumentKVCache,
    most: int | None,
    vocabulary: Callable[[], Sequence[int]],
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
        )
        for name, contexts in cartridges.items()
    ]


def parts_of(
    contexts: Sequence[str], documents: Mapping[str, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return the ids that each context has of their one text."""
    begin = len(documents.get("none", ()))
    return tuple(documents[c][begin if i else 0 :] for i, c in enumerate(contexts))
