"""Choose what stands before a prompt: cartridges for the student, contexts for its teacher.

A cartridge stands alone or beside another's. The teacher reads the prompt's own contexts, or
retrieved ones. Recipes of patients and of a user's documents share these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from cartridge_forge.plugins.documents.corpus import context_tokens, room_beside_a_row
from cartridge_forge.plugins.documents.retrieval import Bm25Router
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.spec.users.data import DataSpec
from cartridge_forge.protocols.teacher_replay import AgentMessage
from cartridge_forge.protocols.types import (
    SEPARATOR,
    GenerateRequest,
    PrefixRef,
    Sampling,
    composed_ref,
)
from cartridge_forge.training.rollouts import StudyPrompt

Turn = TypeVar("Turn")
# (the prompt's cartridge, its own contexts, its text) -> the contexts that the teacher reads
ChooseContexts = Callable[[str, tuple[str, ...], str], tuple[str, ...]]


def with_composition(
    prompts: Sequence[StudyPrompt], version: int, names: Sequence[str], share: float, seed: int
) -> list[StudyPrompt]:
    """Return the prompts over their cartridges of `version`; for about `share` of them, the
    cartridge of another of `names` stands before or after it."""
    composed = []
    for prompt in prompts:
        order = [prompt.cartridge]
        if share:
            rng = random.Random(f"compose/{seed}/{prompt.request.id}")
            neighbours = [name for name in names if name != prompt.cartridge]
            if rng.random() < share and neighbours:
                order.insert(rng.randrange(2), rng.choice(neighbours))
        refs = [PrefixRef(f"cartridge/{name}", version) for name in order]
        composed.append(with_prefix(prompt, composed_ref(refs)))
    return composed


def with_prefix(prompt: StudyPrompt, prefix: PrefixRef) -> StudyPrompt:
    """Return the prompt with another prefix."""
    return replace(prompt, request=replace(prompt.request, prefix=prefix))


def context_ref(contexts: Sequence[str]) -> PrefixRef:
    """Return the prefix of contexts that are read as one text."""
    return PrefixRef(f"document/{SEPARATOR.join(contexts)}", 0)


def contexts_of(about: str) -> tuple[str, ...]:
    """Return the contexts that are read as one text of this name."""
    return tuple(about.split(SEPARATOR))


def texts_of(layout: CartridgeLayout, texts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the texts of the contexts that each cartridge learns from."""
    return {
        name: tuple(texts[c] for c in context_ids) for name, context_ids in layout.contexts.items()
    }


def answered_over(answers: Sequence[Answer], requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Return the answers, each with the cartridge that its request was over, where it had one."""
    records = []
    for answer, request in zip(answers, requests, strict=True):
        kind, _, name = request.prefix.name.partition("/")
        records.append(replace(answer, cartridge=name) if kind == "cartridge" else answer)
    return records


def reading(request: GenerateRequest, answer_ids: tuple[int, ...]) -> GenerateRequest:
    """Return a request for the log-probabilities of `answer_ids` after the prompt of another."""
    return replace(
        request, id=f"{request.id}/read", prompt_ids=(*request.prompt_ids, *answer_ids),
        sampling=Sampling(temperature=0.0, max_tokens=1), seed=0, prompt_logprobs=True,
    )  # fmt: skip


def interleave(rows: Sequence[Sequence[Turn]]) -> list[Turn]:
    """Return items column by column; rows may end early: [[a, b], [c]] -> [a, c, b]."""
    longest = max((len(r) for r in rows), default=0)
    return [r[i] for i in range(longest) for r in rows if i < len(r)]


def titles_of(
    data: DataSpec, layout: CartridgeLayout, names: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the title of each document that its prompts begin with, as `data.name_document` says;
    {} where they begin with none. `names` are the documents' titles by document; those that share
    one are called by their document's name."""
    if data.name_document == "never" or (data.name_document == "auto" and not layout.shared):
        return {}
    title_list = list(names.values())
    return {d: title if title_list.count(title) == 1 else d for d, title in names.items()}


def of_contexts(titles: Mapping[str, str], layout: CartridgeLayout) -> dict[str, str]:
    """Return the titles of documents by context."""
    return {c: titles[document] for c, document in layout.documents.items() if document in titles}


def with_title(titles: Mapping[str, str], about: str, text: str) -> str:
    """Return a prompt's text, after the title of what it is about, if any: "ada novak: ..."."""
    return f"{titles[about]}: {text}" if about in titles else text


def titled_messages(
    titles: Mapping[str, str], about: str, messages: Sequence[AgentMessage]
) -> tuple[AgentMessage, ...]:
    """Return a conversation whose first turn is after the title of what it is about, if any."""
    first, *later = messages
    return (replace(first, content=with_title(titles, about, first.content)), *later)


def own_contexts(cartridge: str, contexts: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Return the contexts that the prompt is about."""
    return contexts


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

    def retrieved(cartridge: str, contexts: tuple[str, ...], text: str) -> tuple[str, ...]:
        best = {name for name, _ in routers[cartridge].top(text, count)}
        return tuple(c for c in layout.contexts[cartridge] if c in best) or contexts

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
