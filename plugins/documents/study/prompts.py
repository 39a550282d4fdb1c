"""Choose what stands before a prompt: cartridges for the student, contexts for its teacher.

A cartridge stands alone or beside others. The teacher reads the prompt's own contexts, or
retrieved ones. Recipes of patients and of a user's documents share these.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.documents.corpus import context_tokens, room_beside_a_row
from cartridge_forge.plugins.documents.retrieval import Bm25Router, count_terms
from cartridge_forge.plugins.documents.spec.data import DataSpec
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import CartridgeLayout
from cartridge_forge.protocols.records.answers import Answer
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    GenerateRequest,
    PrefixRef,
    Sampling,
    composed_ref,
)
from cartridge_forge.training.records import StudyPrompt, with_prefix, with_title

# (the prompt's cartridge, its own contexts, its text) -> the contexts that the teacher reads
ChooseContexts = Callable[[str, tuple[str, ...], str], tuple[str, ...]]
# (a step's prompts, their texts) -> the prompts, some of them over compositions
Compose = Callable[[Sequence[StudyPrompt], Sequence[str]], list[StudyPrompt]]


def texts_of(layout: CartridgeLayout, texts: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the texts of the contexts that each cartridge learns from."""
    return {name: tuple(texts[c] for c in of) for name, of in layout.contexts.items()}


def answered_over(answers: Sequence[Answer], requests: Sequence[GenerateRequest]) -> list[Answer]:
    """Return the answers, each with the cartridge that its request was over, where it had one."""
    found = []
    for answer, request in zip(answers, requests, strict=True):
        kind, _, name = request.prefix.name.partition("/")
        found.append(replace(answer, cartridge=name) if kind == "cartridge" else answer)
    return found


def reading(request: GenerateRequest, answer_ids: tuple[int, ...]) -> GenerateRequest:
    """Return a request for the log-probabilities of `answer_ids` after the prompt of another."""
    return replace(
        request, id=f"{request.id}/read", prompt_ids=(*request.prompt_ids, *answer_ids),
        sampling=Sampling(temperature=0.0, max_tokens=1), seed=0, prompt_logprobs=True,
    )  # fmt: skip


def titles_of(
    data: DataSpec, layout: CartridgeLayout, names: Mapping[str, str]
) -> Mapping[str, str]:
    """Return the title of each document that its prompts begin with, as `data.name_document` says;
    {} where they begin with none. `names` are the documents' titles by document; those that share
    one are called by their document's name."""
    if data.name_document == "never" or (data.name_document == "auto" and not layout.shared):
        return {}
    given = list(names.values())
    return {d: title if given.count(title) == 1 else d for d, title in names.items()}


def of_contexts(titles: Mapping[str, str], layout: CartridgeLayout) -> dict[str, str]:
    """Return the titles of documents by context."""
    return {c: titles[document] for c, document in layout.documents.items() if document in titles}


def titled_messages(
    titles: Mapping[str, str], about: str, messages: Sequence[AgentMessage]
) -> tuple[AgentMessage, ...]:
    """Return a conversation whose first turn is after the title of what it is about, if any."""
    first, *others = messages
    return (replace(first, content=with_title(titles, about, first.content)), *others)


def context_choice(
    spec: DocumentsLearn,
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
        return lambda cartridge, own, text: own
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


def composition_choice(spec: DocumentsLearn, texts: Mapping[str, Sequence[str]]) -> Compose:
    """Return the choice that `train.compose` describes, among cartridges with these `texts`.

    Of a step's prompts a share has its cartridge beside those of others: the best that the router
    finds for the prompt's text, best first, then drawn ones, if fewer share a word with it. The
    prompt's own stands at a drawn place among them, for a request may name any order. The seed and
    the id of the step's first prompt decide the draws. Raises DataError where there are too few
    cartridges, or the model's context is too short for a composition and a row.
    """
    compose, names = spec.train.compose, sorted(texts)
    if compose is None:
        return lambda prompts, questions: list(prompts)
    count = compose.distractors
    if len(names) <= count:
        raise DataError(
            f"train.compose.distractors is {count} and the run has {len(names)} cartridges; lower "
            "it, or give more documents"
        )
    needed = (count + 1) * spec.cartridge.tokens + spec.train.row_tokens
    positions = context_tokens(spec.model.path)
    if positions is not None and needed > positions:
        raise DataError(
            f"a composition of {count + 1} cartridges and a row take {needed:,} tokens, and the "
            f"model reads {positions:,}: lower train.compose.distractors or cartridge.tokens"
        )
    router = Bm25Router(
        {name: [count_terms(text) for text in passages] for name, passages in texts.items()}
    )

    def composition(cartridge: str, text: str, rng: random.Random) -> tuple[str, ...]:
        ranked = [name for name, _ in router.top(text, count + 1) if name != cartridge][:count]
        unranked = [name for name in names if name != cartridge and name not in ranked]
        order = ranked + rng.sample(unranked, count - len(ranked))
        order.insert(rng.randrange(count + 1), cartridge)
        return tuple(order)

    def composed(prompts: Sequence[StudyPrompt], questions: Sequence[str]) -> list[StudyPrompt]:
        rng = random.Random(f"compose/{spec.train.seed}/{prompts[0].request.id}")
        chosen = set(rng.sample(range(len(prompts)), round(compose.share * len(prompts))))
        return [
            replace(p, composed=composition(p.cartridge, text, rng)) if i in chosen else p
            for i, (p, text) in enumerate(zip(prompts, questions, strict=True))
        ]

    return composed


def over_cartridges(prompts: Sequence[StudyPrompt], version: int) -> list[StudyPrompt]:
    """Return the prompts over their cartridges of `version`, or over their compositions."""

    def prefix(names: Sequence[str]) -> PrefixRef:
        return composed_ref([PrefixRef(f"{CARTRIDGE}{name}", version) for name in names])

    return [with_prefix(p, prefix(p.composed or (p.cartridge,))) for p in prompts]


def _require_room(
    spec: DocumentsLearn,
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
