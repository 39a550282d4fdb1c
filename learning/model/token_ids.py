"""Check token ids before a forward pass: embeddings raise for an unknown one, on a GPU for good."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from protocols.errors import DataError


def require_ids(ids: Sequence[int], vocabulary: int, place: str) -> None:
    """Raise DataError for an id that a model of `vocabulary` embeddings does not have. `place` says
    what the ids are of: "the prompt of request r1"."""
    if not ids or (min(ids) >= 0 and max(ids) < vocabulary):
        return
    at, wrong = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocabulary)
    raise DataError(
        f"{place} has the token id {wrong} at {at}, and the model has ids from 0 to "
        f"{vocabulary - 1}; tokenise with the tokenizer that belongs to the model, and leave the "
        "text of tokens out that it has beyond the model's"
    )


def vocabulary_of(model: Path) -> int | None:
    """Return how many token ids a model's embeddings have by its config.json, which its tokenizer
    may have more or fewer of; None where no config is here, or it does not say."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        stated = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return stated if isinstance(stated, int) else None
