"""Cut patients' charts into chunks that the document teacher can read.

    chart of 900 tokens -> chunks of at most 256, each under the chart's head -> patient_01.part_02

Cuts are between notes, else between sentences (`documents.chunks`). A prompt is about passages of
the notes, and these lie in one chunk, or in several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cartridge_forge.plugins.clinic.longhealth import NoteSpan, Patient
from cartridge_forge.plugins.documents.chunks import pieces
from cartridge_forge.plugins.documents.corpus import part_names, tokenised
from cartridge_forge.protocols.errors import DataError

BETWEEN = "\n\n"  # notes, while they are cut: a better place than the end of a sentence


@dataclass(frozen=True)
class ChartChunk:
    """Hold what the teacher reads of a chart: its `text`, made of these passages of the notes."""

    name: str
    text: str
    spans: tuple[NoteSpan, ...]


def chart_chunks(
    patient: Patient, tokenizer: Any, most: int | None, overlap: int
) -> list[ChartChunk]:
    """Return a chart as chunks of at most `most` tokens (None: as one), each of which repeats up to
    `overlap` tokens of the one before it. Raises DataError where the head leaves no room."""
    room = most
    while True:
        chunks = _cut(patient, tokenizer, room, overlap)
        if most is None or room is None:
            return chunks
        excess = max(_tokens(tokenizer, chunk.text, most) for chunk in chunks) - most
        if excess <= 0:
            return chunks
        room -= excess
        if room <= 2 * overlap:
            raise DataError(
                f"a chunk of {most} tokens has no room beside the head of {patient.id}'s chart; "
                "raise teacher.context_tokens, or lower documents.overlap"
            )


def _cut(patient: Patient, tokenizer: Any, room: int | None, overlap: int) -> list[ChartChunk]:
    """Return chunks of at most `room` tokens without the head and the notes' numbers."""
    everything = tuple((i, 0, len(text)) for i, text in enumerate(patient.texts))
    one = ChartChunk(patient.id, patient.document, everything)
    if room is None or _tokens(tokenizer, one.text, room) <= room:
        return [one]
    body = tokenised(tokenizer, BETWEEN.join(patient.texts))
    starts = [sum(len(t) + len(BETWEEN) for t in patient.texts[:i]) for i, _, _ in everything]
    cut = pieces(body, room, overlap)
    chunks = []
    for name, chunk in zip(part_names(patient.id, len(cut)), cut, strict=True):
        spans = tuple(
            (note, max(0, chunk.start_char - first), min(stop, chunk.stop_char - first))
            for (note, _, stop), first in zip(everything, starts, strict=True)
            if chunk.start_char < first + stop and first < chunk.stop_char
        )
        chunks.append(ChartChunk(name, patient.excerpt(spans), spans))
    return chunks


def _tokens(tokenizer: Any, text: str, enough: int) -> int:
    """Return the tokens of a text, at least; a text of at most `enough` bytes is not tokenized, for
    no token is less than a byte."""
    size = len(text.encode())
    return size if size <= enough else len(tokenised(tokenizer, text))


def chunks_holding(chunks: Sequence[ChartChunk], places: Sequence[NoteSpan]) -> tuple[str, ...]:
    """Return the chunks that hold these passages, in order: of each the first chunk that holds it
    whole, else all that hold a part of it."""
    names: set[str] = set()
    for note, start, stop in places:
        spans = [(c.name, a, b) for c in chunks for at, a, b in c.spans if at == note]
        covering = [name for name, a, b in spans if a <= start and stop <= b]
        names |= set(covering[:1] or [name for name, a, b in spans if start < b and a < stop])
    return tuple(chunk.name for chunk in chunks if chunk.name in names)
