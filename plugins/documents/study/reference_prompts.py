"""Make the prompts to whose answers a document's first cartridge is fitted: of its own phrases.

recited   in stretches over the whole text    "how does the text go on after ...?", and its words
asked     drawn from it                       the model with the document answers
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.chat.messages import AgentMessage
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.documents.text_turns import TURNS, text_turn
from cartridge_forge.plugins.documents.words import word_spans
from cartridge_forge.plugins.library.reference_rows import NO_STUDY, StudyPrompts
from cartridge_forge.protocols.errors import DataError

ASKED, RECITED = 16, 16
KINDS = ("recite", "continue", "cloze")
CUE_WORDS, RECITED_WORDS = 8, 40
RECITED_TOKENS = 56  # of an answer in the text's own words, at most


def study_prompts(
    path: str, ids: Sequence[int], stream: str, drawn: int = ASKED, recited: int = RECITED
) -> StudyPrompts:
    """Return so many prompts of both kinds about the text of token ids, in the chat template of the
    model at `path`, drawn by the name of a stream; none for a model without a template that takes
    documents, and of a text that has no phrases."""
    rng = random.Random(stream)
    try:
        tokenizer = load_tokenizer(path)
        text = "\n\n".join(ChatRenderer(tokenizer, {}).texts_of(ids))
        renderer = ChatRenderer(tokenizer, {"document": text})

        def opening(turn: str) -> tuple[int, ...]:
            return renderer.opening("document", [AgentMessage("user", turn)])

        turns = (text_turn(KINDS[i % len(KINDS)], text, rng) for i in range(drawn))
        prompts = dict.fromkeys(opening(turn.turn) for turn in turns if turn is not None)
        own_words = [
            (opening(rng.choice(TURNS["recite"]).format(cue=cue)), renderer.saying(words))
            for cue, words in stretches(text, recited)
        ]
        end_ids = renderer.end_ids
    except DataError:
        return NO_STUDY
    return StudyPrompts(
        tuple(prompts), end_ids, tuple((*a, *b[:RECITED_TOKENS]) for a, b in own_words)
    )


def stretches(text: str, count: int) -> Iterator[tuple[str, str]]:
    """Yield at most so many stretches, evenly spaced over a text: CUE_WORDS words, and those that
    follow. Of a short text fewer, which do not overlap but for their cues."""
    words = word_spans(text)
    count = min(count, len(words) // RECITED_WORDS + 1)
    for i in range(count):
        first = max(0, len(words) - CUE_WORDS - RECITED_WORDS) * i // max(1, count - 1)
        middle, last = first + CUE_WORDS, min(len(words), first + CUE_WORDS + RECITED_WORDS)
        if middle < last:
            cue = text[words[first][0] : words[middle - 1][1]]
            yield cue, text[words[middle][0] : words[last - 1][1]]
