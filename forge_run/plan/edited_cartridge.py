"""Re-fit a cartridge to an edited text in closed form, in this process.

    old text, new text -> changes -> rows of changed and of other passages
                                  -> plugins.library.refit -> the cartridge of the new text

The rows are stretches of tokens around each change, old and new, the rest of the text, and prompts
about both: about changed passages with the answers that the model with the new text writes, about
the others with those of the cartridge as it was.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from cartridge_forge.learning.cartridge import fingerprint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import base_hash, load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.chat.special_tokens import special_in
from cartridge_forge.plugins.documents.edits import (
    Span,
    TextChange,
    changed_ids,
    changed_text,
    text_changes,
    unchanged_text,
)
from cartridge_forge.plugins.documents.study.reference_prompts import study_prompts
from cartridge_forge.plugins.library.formats.base_model import other_weights
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, date_of, source_of
from cartridge_forge.plugins.library.reference_rows import (
    MOST_ROWS,
    NO_STUDY,
    ROW,
    ReferenceRow,
    StudyPrompts,
    row_starts,
    study_rows,
)
from cartridge_forge.plugins.library.refit import DocumentEdit, refitted
from cartridge_forge.plugins.library.store import ORIGIN, UPDATES
from cartridge_forge.protocols.errors import DataError

TOKENIZER, CHANGES = "tokenizer_sha256", "changes"  # in a cartridge's source, and in an update's
BEFORE, BEHIND = 24, 16  # tokens of the text that a row of changed tokens has on each side
PROMPTS = 8  # of each kind, about changed passages and about the others
LEAST_ROW = 4  # tokens of a row between two changes


@dataclass(frozen=True)
class EditedText:
    """Hold a cartridge's text as it was, `old`, and as it is to be, `new`, with the cartridge
    `label`, NAME@VERSION, and the path of its version."""

    label: str
    path: Path
    old: str
    new: str


def tokenizer_hash(tokenizer: Any) -> str:
    """Return the SHA-256 of what a tokenizer does: its own file, or its vocabulary."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str()
    return hashlib.sha256(text.encode()).hexdigest()


def text_hash(text: str) -> str:
    """Return the SHA-256 of a text in UTF-8."""
    return hashlib.sha256(text.encode()).hexdigest()


def edited_cartridge(
    cartridge: CartridgeFile, text: EditedText, model_path: str, dtype: str
) -> tuple[CartridgeFile, list[TextChange]]:
    """Return the cartridge of the new text, with its provenance, and the passages that changed.
    Raises DataError for a model that is not the cartridge's, and a text that is not different, or
    too short or too long."""
    changes = text_changes(text.old, text.new)
    if not changes:
        raise DataError(f"{text.label} has this text already; there is nothing to update")
    tokenizer = load_tokenizer(model_path)
    hashed = tokenizer_hash(tokenizer)
    source = cartridge.facts.source
    if source.get(TOKENIZER, hashed) != hashed:
        raise DataError(
            f"{text.label} was made with another tokenizer ({source[TOKENIZER][:12]}, that of "
            f"{model_path} is {hashed[:12]}); name its model (--set model.path=DIR), or make it "
            "anew: forge make"
        )
    if (special := special_in(tokenizer, text.new)) is not None:
        raise DataError(f"the new text has the model's special token {special}; remove it")
    model = load_model(model_path, dtype)
    wrong = other_weights(cartridge, Path(model_path), {dtype: base_hash(model)})
    if wrong:
        raise DataError(f"{text.label}: {wrong[0]}")
    renderer = ChatRenderer(tokenizer, {"old": text.old, "new": text.new}, date_of(source))
    require_length(model, len(renderer.head("new")), cartridge.tokens, text.label)
    start_kv = cartridge.kv.to(model.device, model.dtype)
    edit = document_edit(model, renderer, model_path, start_kv, text, changes)
    kv = refitted(model, start_kv, cartridge.frozen, edit).to(cartridge.kv.dtype).cpu()
    new_source = updated_source(cartridge, text, changes)
    new_source |= {TOKENIZER: hashed, **source_of(renderer.date)}
    facts = replace(cartridge.facts, source=new_source)
    return CartridgeFile(kv, cartridge.frozen, facts), changes


def updated_source(
    cartridge: CartridgeFile, text: EditedText, changes: Sequence[TextChange]
) -> dict[str, Any]:
    """Return the source of a cartridge that was updated: how it was first made (`start`), and each
    update since with its parent's number and the hashes of both texts. The last has the characters
    of its changes, [old start, old stop, new start, new stop]."""
    source = dict(cartridge.facts.source)
    earlier = [
        {key: value for key, value in one.items() if key != CHANGES}
        for one in source.get(UPDATES, ())
    ]
    numbers = fingerprint(cartridge.kv)
    first = {
        ORIGIN: str(text.path), "sha256": numbers, "tokens": cartridge.tokens,
        "frozen": cartridge.frozen, "source": source,
    }  # fmt: skip
    update = {
        "parent": text.label, "parent_sha256": numbers, "old_text_sha256": text_hash(text.old),
        "text_sha256": text_hash(text.new), CHANGES: [[*one.old, *one.new] for one in changes],
    }  # fmt: skip
    return {
        "by": "update", "start": source.get("start", first) if earlier else first,
        UPDATES: [*earlier, update],
    }  # fmt: skip


def require_length(model: LanguageModel, document: int, tokens: int, label: str) -> None:
    """Raise DataError for a new text of so many tokens that is no longer than its cartridge of
    `tokens`, or that the model does not read at once."""
    if document <= tokens:
        raise DataError(
            f"the new text of {label} has {document} tokens, no more than the cartridge's "
            f"{tokens}, so that a prompt may as well hold it; leave the cartridge as it is"
        )
    if model.longest is not None and document + BEFORE + ROW + BEHIND > model.longest:
        raise DataError(
            f"the new text of {label} has {document:,} tokens, and the model reads "
            f"{model.longest:,} at once: make its cartridges anew, which forge make divides"
        )


def document_edit(
    model: LanguageModel, renderer: ChatRenderer, model_path: str, start_kv: Tensor,
    text: EditedText, changes: Sequence[TextChange], prompts: int = PROMPTS,
) -> DocumentEdit:  # fmt: skip
    """Return the edit of a cartridge `start_kv` [L, 2, H_kv, P, D], whose old and new text
    the renderer has as `old` and `new`. So many `prompts` of each kind are written about changed
    passages and about the others."""
    old_ids, new_ids = renderer.head("old"), renderer.head("new")
    document = document_kv(model, new_ids)
    places = changed_ids(old_ids, new_ids)
    spans = [new for _, new in places]

    def prompts_about(passages: str) -> StudyPrompts:
        ids = renderer.over({"passages": passages}).head("passages") if passages else ()
        stream = f"update/{text_hash(text.new)}"
        return study_prompts(model_path, ids, stream, prompts, prompts) if prompts else NO_STUDY

    about_changed = prompts_about(changed_text(text.new, [one.new for one in changes]))
    about_unchanged = prompts_about(unchanged_text(text.new, [one.new for one in changes]))
    touched = sorted({i for a, b in spans for i in range(a, max(b, a + 1)) if i < len(new_ids)})
    rows = [
        *rows_around(old_ids, [span for span, _ in places]),
        *rows_around(new_ids, spans),
        *rows_between(new_ids, spans),
        *map(ReferenceRow, (*about_changed.recited, *about_unchanged.recited)),
        *study_rows(model, document, about_changed),
        *study_rows(model, start_kv, about_unchanged),
    ]
    return DocumentEdit(document_kv(model, old_ids), document, touched, rows)


def rows_around(ids: Sequence[int], spans: Sequence[Span]) -> list[ReferenceRow]:
    """Return rows of the tokens in these spans, with BEFORE tokens before and BEHIND behind each:
    of more than MOST_ROWS as many, evenly spaced."""
    rows = []
    for start, stop in spans:
        first, last = max(0, start - BEFORE), min(len(ids), stop + BEHIND)
        cuts = range(first, last, ROW)
        rows += [ReferenceRow(tuple(ids[a : min(last, a + BEFORE + ROW)])) for a in cuts]
    count = min(len(rows), MOST_ROWS)
    return [rows[len(rows) * i // count] for i in range(count)]


def rows_between(ids: Sequence[int], spans: Sequence[Span]) -> list[ReferenceRow]:
    """Return rows of a text's tokens, evenly spaced, without those that changed."""
    changed = {i for a, b in spans for i in range(a, b)}
    rows = []
    for start in row_starts(len(ids)):
        row: list[int] = []
        for i in range(start, min(len(ids), start + ROW) + 1):
            if i < min(len(ids), start + ROW) and i not in changed:
                row.append(ids[i])
                continue
            if len(row) >= LEAST_ROW:
                rows.append(ReferenceRow(tuple(row)))
            row = []
    return rows
