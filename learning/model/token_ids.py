"""Check token ids before a forward pass: embeddings raise for an unknown one, on a GPU for good."""

from __future__ import annotations

from collections.abc import Sequence

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
