"""Choose what the document teacher reads before a prompt: its own contexts, or retrieved ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from documents.corpus import context_tokens, room_beside_a_row
from documents.retrieval import Bm25Router
from protocols.errors import DataError
from protocols.layout import CartridgeLayout
from protocols.spec.learn import LearnSpec

# (the prompt's cartridge, its own contexts, its text) -> the contexts that the teacher reads
ChooseContexts = Callable[[str, tuple[str, ...], str], tuple[str, ...]]


def own_contexts(cartridge: str, own: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Return the contexts that the prompt is about."""
    return own


def context_choice(
    spec: LearnSpec,
    layout: CartridgeLayout,
    texts: Mapping[str, str],
    documents: Mapping[str, tuple[int, ...]],
) -> ChooseContexts:
    """Return the choice that `teacher.context` describes, among contexts with these `texts` and
    token ids in `documents`.

    Retrieved are the `teacher.retrieved` best of the cartridge's contexts for the prompt's text, by
    BM25, read as one text in the documents' order; its own where no context shares a word with it.
    Raises DataError where so many do not fit the model's context beside a row.
    """
    if spec.teacher.context == "own":
        return own_contexts
    count = spec.teacher.retrieved
    _require_room(spec, layout, documents, count)
    routers = {
        name: Bm25Router.of_texts({context: texts[context] for context in contexts})
        for name, contexts in layout.contexts.items()
    }

    def retrieved(cartridge: str, own: tuple[str, ...], text: str) -> tuple[str, ...]:
        best = {name for name, _ in routers[cartridge].top(text, count)}
        return tuple(c for c in layout.contexts[cartridge] if c in best) or own

    return retrieved


def _require_room(
    spec: LearnSpec,
    layout: CartridgeLayout,
    documents: Mapping[str, tuple[int, ...]],
    count: int,
) -> None:
    positions = context_tokens(spec.model.path)
    if positions is None:
        return
    room = room_beside_a_row(spec, positions)
    for name, contexts in layout.contexts.items():
        needed = sum(sorted((len(documents[c]) for c in contexts), reverse=True)[:count])
        if needed > room:
            raise DataError(
                f"{count} retrieved contexts of cartridge {name} take up to {needed:,} tokens, and "
                f"the model reads {room:,} beside a row: lower teacher.retrieved or "
                "teacher.context_tokens"
            )
