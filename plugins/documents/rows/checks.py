"""Check a dataset's rows before a run: the lengths of its documents, that its texts are text, and
that they are the same rows when a run is resumed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.special_tokens import require_text, special_in
from cartridge_forge.plugins.documents.rows.reading import RowSet
from cartridge_forge.plugins.documents.spec.learn import DocumentsLearn
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.files import write_atomically
from cartridge_forge.services.run_directory import RunDirectory


def note_rows(rows: RowSet, directory: RunDirectory) -> None:
    """Write what identifies the rows of a run. Raises CheckpointError where it differs on
    resume."""
    note_data({
        "source": rows.source, "training": len(rows.training), "held_out": len(rows.held_out),
        "documents": len(rows.texts), "sha256": rows.sha256,
    }, directory)  # fmt: skip


def note_data(facts: Mapping[str, Any], directory: RunDirectory) -> None:
    """Write the facts of a run's data: its `source`, how much of it is `training` and `held_out`,
    and its `sha256`. Raises CheckpointError where the hash differs on resume."""
    if directory.rows.exists():
        recorded = json.loads(directory.rows.read_bytes())
        if recorded["sha256"] != facts["sha256"]:
            raise CheckpointError(
                f"the data of {facts['source']} changed since the run began ({directory.rows}: "
                f"{recorded['training']} to train on and {recorded['held_out']} held out, now "
                f"{facts['training']} and {facts['held_out']}); bring them back, or start anew "
                "without --resume"
            )
        return
    write_atomically(directory.rows, json.dumps(facts, indent=2, ensure_ascii=False) + "\n")


def require_plain(rows: RowSet, tokenizer: Any) -> None:
    """Raise DataError where messages or answers of rows have special tokens of the model."""
    texts = (
        (row.place, text)
        for row in (*rows.training, *rows.held_out)
        for text in (*(m.content for m in row.messages), str(row.answer))
    )
    require_text(tokenizer, texts, f"rows of {rows.source}")


def require_lengths(spec: DocumentsLearn, texts: Mapping[str, str], tokenizer: Any) -> None:
    """Raise DataError for a document that no cartridge can stand for: one that has no more tokens
    than a cartridge, or one of the model's special tokens."""
    conversation = ChatRenderer(tokenizer, texts)
    for name, text in texts.items():
        special = special_in(tokenizer, text)
        if special is not None:
            raise DataError(
                f"the document {name} ({text[:40]!r}) has the model's special token {special}; "
                "remove it"
            )
        count = len(conversation.head(name))
        if count <= spec.cartridge.tokens:
            raise DataError(
                f"the document {name} ({text[:40]!r}) has {count} tokens, no more than a "
                f"cartridge; lower cartridge.tokens ({spec.cartridge.tokens})"
            )
