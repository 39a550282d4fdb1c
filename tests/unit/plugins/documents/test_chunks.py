"""Chunks: exact spans, every token in one at least, cut at paragraphs and sentences."""

import itertools
import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.chunks import TokenizedText, pieces, random_chunk

TEXT = "One two three. Four five.\n\nSix seven eight nine. Ten!\nEleven twelve"


def by_word(text: str) -> TokenizedText:
    return TokenizedText(text, [m.span() for m in re.finditer(r"\w+|[^\w\s]", text)])


def by_byte(text: str) -> TokenizedText:
    """As a byte-level tokenizer: a token a byte, spaces too."""
    return TokenizedText(text, [(i, i + 1) for i, c in enumerate(text) for _ in c.encode()])


def test_cuts_are_at_paragraphs_then_sentences_then_words() -> None:
    tokens = by_word(TEXT)
    assert len(tokens) == 16
    found = [tokens.text_of(c) for c in pieces(tokens, 9)]
    assert found == ["One two three. Four five.\n\n", "Six seven eight nine. Ten!\nEleven twelve"]
    found = [tokens.text_of(c) for c in pieces(tokens, 5)]
    assert found == [
        "One two three. ", "Four five.\n\n", "Six seven eight nine. ", "Ten!\nEleven twelve",
    ]  # fmt: skip
    assert [tokens.text_of(c) for c in pieces(tokens, 3)][:2] == ["One two ", "three. "]


def test_a_short_document_is_one_piece() -> None:
    (chunk,) = pieces(by_word(TEXT), 16)
    assert (chunk.start, chunk.stop, chunk.start_char, chunk.stop_char) == (0, 16, 0, len(TEXT))


def test_no_tiny_piece_is_left_at_the_end() -> None:
    tokens = by_word("w " * 101)
    assert [c.tokens for c in pieces(tokens, 100)] == [51, 50]
    assert [c.tokens for c in pieces(tokens, 50)] == [50, 26, 25]


def test_pieces_overlap_by_so_many_tokens() -> None:
    tokens = by_word("w " * 100)
    spans = [(c.start, c.stop) for c in pieces(tokens, 40, overlap=10)]
    assert spans == [(0, 40), (30, 65), (55, 78), (68, 100)]


@pytest.mark.parametrize(("size", "overlap"), [(4, 2), (4, -1), (0, 0)])
def test_bad_sizes(size: int, overlap: int) -> None:
    with pytest.raises(ValueError, match="overlap must be"):
        pieces(by_word(TEXT), size, overlap)


TEXTS = st.text(alphabet="ab.\n !é漢\U0001f600", max_size=120)


@given(TEXTS, st.integers(1, 40), st.integers(0, 19))
def test_every_token_and_character_is_covered(text: str, size: int, overlap: int) -> None:
    overlap = min(overlap, (size - 1) // 2)
    for tokens in (by_word(text), by_byte(text)):
        found = pieces(tokens, size, overlap)
        if not len(tokens):
            assert found == []
            continue
        assert (found[0].start, found[-1].stop) == (0, len(tokens))
        assert (found[0].start_char, found[-1].stop_char) == (0, len(text))
        assert all(1 <= c.tokens <= size for c in found)
        for a, b in itertools.pairwise(found):
            assert a.start < b.start <= a.stop < b.stop
            assert b.start_char <= a.stop_char  # no character between two
        if not overlap and size >= 16:  # then no character is cut through
            assert "".join(map(tokens.text_of, found)) == text
        assert found == pieces(tokens, size, overlap)


@given(TEXTS.filter(lambda t: bool(re.search(r"\w", t))), st.integers(1, 30), st.integers(0, 30),
       st.integers())  # fmt: skip
def test_random_chunks_keep_their_bounds(text: str, low: int, more: int, seed: int) -> None:
    tokens = by_byte(text)
    chunk = random_chunk(tokens, low, low + more, random.Random(seed))
    assert min(low, len(tokens)) <= chunk.tokens <= low + more
    assert 0 <= chunk.start < chunk.stop <= len(tokens)
    assert chunk == random_chunk(tokens, low, low + more, random.Random(seed))
    assert tokens.text_of(chunk) in text


def test_random_chunks_reach_every_sentence() -> None:
    tokens = by_word(" ".join(f"Sentence number {i} stands here." for i in range(60)))
    rng = random.Random("chunks")
    said = "".join(tokens.text_of(random_chunk(tokens, 30, 60, rng)) for _ in range(200))
    assert all(f"number {i} " in said for i in range(60))
    assert said.count("Sentence") == said.count("number")  # begun and ended at sentences


def test_sentences_end_before_tokens_that_begin_with_their_space() -> None:
    """Offsets of a tokenizer whose words begin with a space: " Two" is the token after "One." """
    text = "One two. Three four. Five."
    spans = [(0, 3), (3, 7), (7, 8), (8, 14), (14, 19), (19, 20), (20, 25), (25, 26)]
    found = pieces(TokenizedText(text, spans), 4)
    assert [TokenizedText(text, spans).text_of(c) for c in found] == [
        "One two.", " Three four.", " Five."
    ]  # fmt: skip
