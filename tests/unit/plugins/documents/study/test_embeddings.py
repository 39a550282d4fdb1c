"""Ranks by embeddings equal those computed from the wheel's own files."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import wordllama
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from cartridge_forge.plugins.documents.retrieval import Bm25Router
from cartridge_forge.plugins.documents.study.embeddings import (
    EmbeddingRanker,
    embedder,
    embeddings_of,
)
from cartridge_forge.protocols.errors import RunError

TEXTS = {
    "drug": "Her physician prescribed insulin twice a day.",
    "market": "Prices of stocks fell sharply on Monday.",
    "weather": "It rained for most of the afternoon.",
}
WHEEL = Path(wordllama.__file__).parent


def test_an_embedding_is_the_mean_of_its_tokens() -> None:
    (table,) = load_file(WHEEL / "weights/l2_supercat_256.safetensors").values()  # [V, 256]
    tokenizer = Tokenizer.from_file(str(WHEEL / "tokenizers/l2_supercat_tokenizer_config.json"))
    for text, vector in zip(TEXTS.values(), embeddings_of([*TEXTS.values()]), strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        mean = table[ids].astype(np.float64).mean(0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)


def test_a_question_in_other_words_finds_its_text() -> None:
    question = "Which medication did doctors give?"
    assert not Bm25Router.of_texts(TEXTS).top(question, 3)
    ranked = EmbeddingRanker(TEXTS).top(question, 3)
    assert ranked[0][0] == "drug"
    assert [score for _, score in ranked] == sorted((s for _, s in ranked), reverse=True)
    assert EmbeddingRanker(TEXTS).top(question, 2) == ranked[:2]


def test_text_without_a_word_is_near_to_nothing() -> None:
    ranker = EmbeddingRanker({**TEXTS, "blank": "  \n"})
    assert dict(ranker.top("insulin", 4))["blank"] == 0
    # All are equally far from such a question: they come in the order of their names.
    assert ranker.top(" ", 4) == [(name, 0.0) for name in ("blank", "drug", "market", "weather")]


def test_without_the_package_its_command_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wordllama", None)
    embedder.cache_clear()
    with pytest.raises(RunError, match=r"pip install .*or rank them by bm25"):
        EmbeddingRanker(TEXTS)
