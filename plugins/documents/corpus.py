"""Read a user's documents as tokens, and split long ones into parts.

    data.path -> documents.reading -> tokens -> parts of at most `teacher.context_tokens`
                                             -> left out: documents that no cartridge can replace

A part is what the document teacher reads: `report.part_01`, `report.part_02`. With `documents.long:
split` it is a document of its own, with `chunks` it belongs to `report`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cartridge_forge.learning.model.hub import model_files
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.rollouts import hash_of
from cartridge_forge.plugins.chat.special_tokens import special_in
from cartridge_forge.plugins.documents.chunks import Chunk, TokenizedText, pieces
from cartridge_forge.plugins.documents.formats import ReadOptions
from cartridge_forge.plugins.documents.reading import (
    ReadLimits,
    ReadResult,
    SkippedFile,
    UserDocument,
    read_documents,
)
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.layout import CartridgeLayout, layout_of

POSITIONS = "max_position_embeddings"  # in a model's config
TEMPLATE_TOKENS = 64  # of a context, for the chat template around the document


@dataclass(frozen=True)
class CorpusDocument:
    """Hold what the teacher reads: `chunk` of the file `document`, whole or in part. `of` names the
    document that it belongs to, itself or the whole. `text` is the chunk's own, and `tokens` are
    those of `text`. `about` is a line that self-study reads before each passage from the middle,
    "" for none. `title` is what prompts call the document, "" for its name."""

    name: str
    of: str
    document: UserDocument
    chunk: Chunk
    text: str
    tokens: TokenizedText
    about: str = ""
    title: str = ""


@dataclass(frozen=True)
class Corpus:
    """Hold all parts by name, in order, with the cartridges that learn from them, skipped files and
    notes."""

    parts: Mapping[str, CorpusDocument]
    layout: CartridgeLayout
    left_out: tuple[SkippedFile, ...]
    notes: tuple[SkippedFile, ...]

    @property
    def count(self) -> int:
        """Return how many texts of the user's the parts are of."""
        return len({part.document.name for part in self.parts.values()})

    @property
    def texts(self) -> dict[str, str]:
        return {name: part.text for name, part in self.parts.items()}

    @property
    def hashes(self) -> dict[str, str]:
        """Return the hash of every part's document, by part, as answers record it."""
        return {
            name: hash_of(part.text if part.of == name else part.document.text)
            for name, part in self.parts.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the corpus as plain JSON: hashes and spans, no texts."""
        return {
            "documents": [
                {
                    "name": p.name, "source": p.document.source, "sha256": p.document.sha256,
                    "encoding": p.document.encoding, "tokens": len(p.tokens),
                    "chars": [p.chunk.start_char, p.chunk.stop_char],
                    **({} if p.of == p.name else {"of": p.of}),
                }
                for p in self.parts.values()
            ],
            "left_out": [str(item) for item in self.left_out],
            "notes": [str(item) for item in self.notes],
        }  # fmt: skip


def context_tokens(path: str) -> int | None:
    """Return the number of positions in a model's config; None where the config has none. Raises
    DataError when there is no model at `path`."""
    file = Path(path) / "config.json"
    stated = json.loads(file.read_text()).get(POSITIONS) if file.is_file() else None
    if isinstance(stated, int):
        return stated  # without the two seconds of importing the model's code
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_files(path))
    except (OSError, ValueError) as error:
        raise DataError(
            f"no model at {path!r}: {str(error).splitlines()[0]}; set model to a directory with "
            "config.json, or to a hub id that this machine can reach"
        ) from error
    positions = getattr(config, POSITIONS, None)
    return positions if isinstance(positions, int) else None


def read_parts(spec: DocumentsLearn, tokenizer: Any) -> Corpus:
    """Return the run's documents. Raises DataError for data.path that cannot be read, a document
    that is too long for `documents.long: refuse`, more documents than data.patients, and where none
    is left."""
    read, path = spec.documents, spec.data.path
    if path is None:
        raise DataError("there are no documents; add --set data.path=FOLDER")
    reading = read_documents(
        path.split(os.pathsep),
        ReadOptions(read.text_fields, read.encoding),
        ReadLimits(read.max_file_bytes, read.max_total_bytes),
    )
    corpus = corpus_of(spec, reading, tokenizer)
    if (count := len(set(corpus.layout.documents.values()))) > spec.data.patients:
        raise DataError(
            f"{path} holds {count:,} documents (or parts of long ones), and data.patients allows "
            f"{spec.data.patients}; set it to {count} (--set data.patients={count}), give fewer "
            "files, or a model that reads more"
        )
    return corpus


def corpus_of(
    spec: DocumentsLearn,
    reading: ReadResult,
    tokenizer: Any,
    owners: Mapping[str, str] | None = None,
) -> Corpus:
    """Return documents that were read, as parts; `owners` tells of chunks which document they
    belong to. Raises DataError for one that is too long for `documents.long: refuse`, and where
    none is left."""
    read, path = spec.documents, spec.data.path
    most = longest(spec, context_tokens(spec.model.path))
    left_out, notes = list(reading.left_out), list(reading.notes)
    read_in: list[tuple[UserDocument, TokenizedText, list[Chunk]]] = []
    for document in reading.documents:
        special = special_in(tokenizer, document.text)
        if special is not None:
            left_out.append(
                SkippedFile(document.source, f"has the model's special token {special}; remove it")
            )
            continue
        tokens = tokenised(tokenizer, document.text)
        if most is None or len(tokens) <= most:
            read_in.append((document, tokens, [tokens.chunk(0, len(tokens))]))
            continue
        if read.long == "refuse":
            raise DataError(
                f"{document.source} has {len(tokens):,} tokens, over the {most:,} of a document; "
                "set documents.long: chunks, raise teacher.context_tokens as far as the model's "
                "context allows, or cut it up"
            )
        cut = pieces(tokens, most, read.overlap)
        why = f"has {len(tokens):,} tokens, over {most:,}: read in {len(cut)}"
        kind = "chunks" if read.long == "chunks" else "parts, each a document of its own"
        notes.append(SkippedFile(document.source, f"{why} {kind}"))
        read_in.append((document, tokens, cut))
    owner_of = owners or {}
    apart = read.long == "split"
    parts = {p.name: p for one in read_in for p in _parts(*one, apart, tokenizer)}
    parts = {name: replace(p, of=owner_of.get(name, p.of)) for name, p in parts.items()}
    conversation = ChatRenderer(tokenizer, {name: part.text for name, part in parts.items()})
    for name in list(parts):
        count = len(conversation.head(name))
        undivided = spec.cartridge.per == "document" and parts[name].of == name
        if undivided and count <= spec.cartridge.tokens:
            why = f"has {count} tokens, no more than a cartridge, so a prompt may as well hold it"
            why += f"; or lower cartridge.tokens, which is {spec.cartridge.tokens}"
            left_out.append(SkippedFile(parts.pop(name).document.source, f"{why} ({name})"))
    if not parts:
        listed = "".join(f"\n  {item}" for item in left_out)
        raise DataError(f"no document of {path} can be used{listed}")
    layout = layout_of(spec.cartridge, {name: part.of for name, part in parts.items()})
    return Corpus(parts, layout, tuple(left_out), tuple(notes))


def room_beside_a_row(spec: DocumentsLearn, context: int) -> int:
    """Return the tokens that a model which reads `context` tokens has before a prompt."""
    return context - spec.train.row_tokens - TEMPLATE_TOKENS


def longest(spec: DocumentsLearn, context: int | None) -> int | None:
    """Return the most tokens of a document or chunk that a teacher with a context of so many tokens
    reads, None without a bound. Raises DataError where none longer than a cartridge of its own fits
    the model, or the overlap is too large."""
    room = None if context is None else room_beside_a_row(spec, context)
    least = spec.cartridge.tokens if spec.cartridge.per == "document" else 1
    if room is not None and room <= least:
        raise DataError(
            f"the model reads {context} tokens, of which a row takes train.row_tokens "
            f"({spec.train.row_tokens}): no document longer than cartridge.tokens "
            f"({spec.cartridge.tokens}) is left; lower one of the two"
        )
    bounds = (room, spec.teacher.context_tokens)
    most = min((bound for bound in bounds if bound is not None), default=None)
    if most is not None and 2 * spec.documents.overlap >= most:
        raise DataError(
            f"documents.overlap must be under half of a part ({most} tokens): got "
            f"{spec.documents.overlap}; lower it"
        )
    return most


def tokenised(tokenizer: Any, text: str) -> TokenizedText:
    """Return the text with its tokens' spans. Raises DataError for a tokenizer without offsets."""
    if not tokenizer.is_fast:
        raise DataError(
            "the model's tokenizer does not give the positions of its tokens; give a model with a "
            "tokenizer.json"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return TokenizedText(text, encoded["offset_mapping"])


def part_names(document: str, count: int) -> list[str]:
    """Return the names of a document's parts: `["a"]`, or `["a.part_01", "a.part_02"]`."""
    if count == 1:
        return [document]
    digits = max(2, len(str(count)))
    return [f"{document}.part_{i:0{digits}}" for i in range(1, count + 1)]


def _parts(
    document: UserDocument,
    tokens: TokenizedText,
    cut: Sequence[Chunk],
    apart: bool,
    tokenizer: Any,
) -> list[CorpusDocument]:
    document_name = document.name
    if len(cut) == 1:
        return [
            CorpusDocument(document_name, document_name, document, cut[0], document.text, tokens)
        ]
    parts = []
    for name, chunk in zip(part_names(document_name, len(cut)), cut, strict=True):
        text, owner = tokens.text_of(chunk), name if apart else document_name
        parts.append(CorpusDocument(name, owner, document, chunk, text, tokenised(tokenizer, text)))
    return parts
