"""Rank texts by the cosine of their embeddings and a question's: they may share no word.

A text's embedding is the mean of 256 numbers a token, by the weights that wordllama's wheel brings:
no model runs and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.packages import extra_command


@cache
def embedder() -> Any:
    """Return wordllama's embeddings of words. Raises RunError where the package is not
    installed."""
    try:
        import wordllama
    except ImportError as error:
        raise RunError(
            "passages by embeddings need wordllama, which is not installed: run "
            f"`{extra_command('embeddings')}`, or rank them by bm25"
        ) from error
    # Its own default looks for the wheel's tokenizer in another folder and fetches it from a hub.
    folder = Path(wordllama.__file__).parent
    return wordllama.WordLlama.load(cache_dir=folder, disable_download=True)


def embeddings_of(texts: list[str]) -> NDArray[np.float32]:
    """Return the embeddings [n, 256] of texts, each of length 1, or 0 of one without a
    word."""
    vectors: NDArray[np.float32] = embedder().embed([text.strip() or " " for text in texts])
    vectors[[not text.strip() for text in texts]] = 0
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(lengths > 0, lengths, 1)


class EmbeddingRanker:
    """Rank names by the embedding of the text of each. Raises RunError as `embedder` does."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.names = tuple(sorted(texts))
        self._vectors = embeddings_of([texts[name] for name in self.names])  # [n, 256]

    def top(self, text: str, n: int) -> list[tuple[str, float]]:
        """Return the best `n` names with their cosines, best first, ties by name."""
        (vector,) = embeddings_of([text])
        scores = (self._vectors @ vector).tolist()
        ranked = sorted(zip(self.names, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))
        return ranked[:n]
