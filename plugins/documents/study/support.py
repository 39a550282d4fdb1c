"""Find the passages of a document that support an answer, by BM25 of question and answer."""

from __future__ import annotations

from dataclasses import dataclass

from cartridge_forge.plugins.documents.edits import passage_spans
from cartridge_forge.plugins.documents.retrieval import Bm25Router

SUPPORTING = 3  # passages of an answer, at most


@dataclass(frozen=True)
class SupportingPassage:
    """Hold a sentence or line of a document, its characters [start, stop) there, and its BM25 score
    for question and answer together."""

    start: int
    stop: int
    text: str
    score: float


def supporting_passages(
    document: str, question: str, answer: str, count: int = SUPPORTING
) -> list[SupportingPassage]:
    """Return the passages with words of question and answer, best first, at most `count`; none
    where no passage shares a word with them."""
    spans = {f"{start:09d}": (start, stop) for start, stop in passage_spans(document)}
    router = Bm25Router.of_texts({name: document[a:b] for name, (a, b) in spans.items()})
    return [
        SupportingPassage(*spans[name], document[slice(*spans[name])], score)
        for name, score in router.top(f"{question} {answer}", count)
    ]
