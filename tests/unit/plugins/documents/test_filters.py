"""Test how documents are divided, and which texts are left out."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.chunks import TokenizedText, pieces, random_chunk
from cartridge_forge.plugins.documents.filters import (
    DuplicateFilter,
    TextBounds,
    fault,
    jaccard,
    normalised,
    shingles,
)
from cartridge_forge.plugins.documents.near_duplicates import (
    LocatedText,
    PromptOverlap,
    clean,
    overlaps,
)
from cartridge_forge.protocols.errors import DataError

PASSAGE = (
    "The kestrels of the old mill breed nine days earlier than they did when the notebooks began."
)


@pytest.mark.parametrize(
    ("text", "ended", "expected"),
    [
        ("", True, "empty"),
        (" ...\n", True, "empty"),
        ("Why?", True, "too_short"),
        ("word " * 41, True, "too_long"),
        ("When do the birds breed now", False, "no_end"),
        ("a b c d " * 5, True, "repetition"),
        ("a b c d " * 2, True, None),
        ("The kestrels of the old mill breed nine days earlier than they did.", True, "echo"),
        ("of the old mill", True, "echo"),
        ("By how many days is the first egg earlier now?", True, None),
    ],
)
def test_faults(text: str, ended: bool, expected: str | None) -> None:
    assert fault(text, PASSAGE, ended, TextBounds(least_words=3, most_words=40)) == expected


def test_likeness_by_hand() -> None:
    a, b = shingles("one two three four"), shingles("one two three five")
    assert (len(a), len(b)) == (2, 2)  # one-two-three is in both
    assert jaccard(a, b) == pytest.approx(1 / 3)
    assert shingles("One, two") == shingles("one two")
    assert jaccard(frozenset(), frozenset()) == 1.0


def test_doubles_and_near_doubles() -> None:
    seen = DuplicateFilter(alike=0.8)
    words = [f"w{i}" for i in range(30)]
    assert seen.found("Where do kestrels breed?") is None
    assert seen.found("where do KESTRELS breed") == "double"
    assert seen.found(" ".join(words)) is None
    # One word at the end: 28 shingles before, 29 with it, 28 in both.
    assert seen.found(" ".join([*words, "more"])) == "near_double"
    assert seen.found(" ".join([*words[:15], "other", *words[16:]])) == "near_double"  # 25 of 31
    changed = [*words[:9], "other", *words[10:20], "thing", *words[21:]]
    assert seen.found(" ".join(changed)) is None  # 22 of 34
    assert seen.found(" ".join(words[:20])) is None  # 18 of 28: not alike enough


@given(st.lists(st.text("abc ", min_size=1, max_size=30), max_size=25))
def test_doubles_are_found_as_by_comparing_all(texts: list[str]) -> None:
    seen, kept = DuplicateFilter(alike=0.8), []
    for text in texts:
        like = any(
            normalised(text) == normalised(k) or jaccard(shingles(text), shingles(k)) >= 0.8
            for k in kept
        )
        assert (seen.found(text) is not None) == like
        if not like:
            kept.append(text)


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


JUNE = LocatedText("salt", "How many days did a pond take to dry in June?", "q.json: a")


def about(text: str, document: str = "salt", place: str = "rollouts.jsonl: 1") -> LocatedText:
    return LocatedText(document, text, place)


def test_case_marks_and_spaces_do_not_hide_a_double() -> None:
    (found,) = overlaps([about("how many days did a pond\n take, to dry in JUNE")], [JUNE], 0.8)
    assert (found.kind, found.likeness, found.question) == ("exact", 1.0, JUNE)
    assert str(found) == (
        "rollouts.jsonl: 1 ('how many days did a pond take, to dry in JUNE') has the words of "
        "q.json: a ('How many days did a pond take to dry in June?')"
    )


def test_a_near_double_is_told_with_its_likeness() -> None:
    # 11 words have 9 shingles; one more word at the end leaves them all and adds one: 9 of 10.
    (found,) = overlaps([about("How many days did a pond take to dry in June then?")], [JUNE], 0.9)
    assert (found.kind, found.likeness) == ("near", pytest.approx(0.9))
    assert (
        overlaps([about("How many days did a pond take to dry in June then?")], [JUNE], 0.91) == []
    )


def test_the_same_words_about_another_document_are_another_question() -> None:
    assert overlaps([about(JUNE.text, document="mill")], [JUNE], 0.8) == []


def test_what_comes_again_is_told_once_and_empty_texts_are_nothing() -> None:
    texts = [about(JUNE.text, place="first"), about(JUNE.text + "?", place="second"), about("?!")]
    (found,) = overlaps(texts, [JUNE, LocatedText("salt", "...", "q.json: b")], 0.8)
    assert found.training.place == "first"
    assert overlaps([], [JUNE], 0.8) == overlaps(texts, [], 0.8) == []


words = st.lists(st.sampled_from("abcdefg"), min_size=0, max_size=9).map(" ".join)


@given(
    st.lists(words, max_size=8), st.lists(words, max_size=8), st.sampled_from([0.3, 0.5, 0.8, 1])
)
def test_all_pairs_and_no_others_are_found(
    training: list[str], asked: list[str], alike: float
) -> None:
    texts = [about(text, place=str(i)) for i, text in enumerate(training)]
    questions = [about(text, place=str(i)) for i, text in enumerate(asked)]
    expected = set()
    for i, text in enumerate(training):
        if text and text not in training[:i]:
            for j, question in enumerate(asked):
                likeness = jaccard(shingles(text), shingles(question))
                if question and likeness >= alike:
                    same = normalised(text) == normalised(question)
                    expected.add(("exact" if same else "near", str(i), str(j)))
    found = overlaps(texts, questions, alike)
    assert {(f.kind, f.training.place, f.question.place) for f in found} == expected
    assert len(found) == len(expected)


def test_ten_thousand_prompts_against_a_thousand_questions_take_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of ten million pairs hardly any are compared."""
    rng = random.Random("contamination/speed")

    def text() -> str:
        return "what is the value of the " + " ".join(f"w{rng.randrange(400)}" for _ in range(12))

    questions = [about(text(), place=f"q{i}") for i in range(1000)]
    texts = [about(text(), place=f"t{i}") for i in range(10_000)]
    texts[77] = about(questions[5].text + " today", place="leak")
    compared = Mock(wraps=jaccard)
    monkeypatch.setattr("cartridge_forge.plugins.documents.near_duplicates.jaccard", compared)
    found = overlaps(texts, questions, 0.8)
    assert compared.call_count < 100_000
    assert [(type(f), f.training.place, f.question.place) for f in found] == [
        (PromptOverlap, "leak", "q5")
    ]


FOUND = [
    PromptOverlap(
        "exact",
        1.0,
        LocatedText("d", f"text {i}", f"rows: {i}"),
        LocatedText("d", "text", f"q: {i}"),
    )
    for i in range(7)
]


def test_failing_names_the_first_few_and_the_file(tmp_path: Path) -> None:
    file = tmp_path / "contamination.jsonl"
    with pytest.raises(DataError) as error:
        clean(FOUND, "fail", file)
    told = str(error.value)
    assert told.startswith("7 training prompts double evaluation questions")
    assert all((f"q: {i}" in told) == (i < 5) for i in range(7))
    assert "and 2 more" in told
    assert str(file) in told
    assert error.value.exit_code == 2
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["training"]["place"] for row in rows] == [f"rows: {i}" for i in range(7)]


def test_warning_writes_the_file_alone_and_nothing_removes_it(tmp_path: Path) -> None:
    file = tmp_path / "contamination.jsonl"
    clean(FOUND, "warn", file)
    assert len(file.read_text().splitlines()) == 7
    clean([], "fail", file)
    assert not file.exists()
