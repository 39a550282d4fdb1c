"""Self-study turns that a document's own words answer: worked by hand, and true of every draw."""

import random
from pathlib import Path

import pytest

from cartridge_forge.plugins.documents.text_turns import (
    BLANK,
    answers_in,
    question_fault,
    question_prompt,
    quizzed,
    text_turn,
)

ARTICLES = Path(__file__).resolve().parents[3] / "data" / "articles"
SENTENCE = "In 1874 the Harrow Salt Company sold 42% of its pans because of the railway."


@pytest.fixture(scope="module")
def text() -> str:
    return (ARTICLES / "kestrel.md").read_text()


@pytest.mark.parametrize("number", range(30))
def test_cue_and_answer_are_neighbours_in_the_text(text: str, number: int) -> None:
    recited = text_turn("recite", text, random.Random(number))
    assert recited is not None
    start, stop = recited.chars
    passage = text[start:stop]
    cue = passage[: -len(recited.answer)].strip()
    assert passage.endswith(recited.answer)
    assert cue in recited.turn
    assert 6 <= len(cue.split()) <= 14
    assert 16 <= len(recited.answer.split()) <= 40

    ended = text_turn("continue", text, random.Random(number))
    assert ended is not None
    sentence = text[slice(*ended.chars)]
    assert sentence.endswith(ended.answer)
    assert sentence[: -len(ended.answer)].strip() in ended.turn

    asked = text_turn("cloze", text, random.Random(number))
    assert asked is not None
    turn = asked.answer.join(asked.turn.rsplit(BLANK, 1))
    assert BLANK in asked.turn
    assert text[slice(*asked.chars)] in turn or '" in the text' in turn

    told = text_turn("paraphrase", text, random.Random(number))
    assert told is not None
    assert told.answer == ""


def test_numbers_names_and_parts_of_a_sentence_can_be_left_out() -> None:
    assert answers_in(SENTENCE) == [
        "1874", "Harrow Salt Company", "42% of its pans", "its pans because of the railway",
        "of the railway", "the railway",
    ]  # fmt: skip


def test_a_text_without_sentences_or_words_has_no_turn() -> None:
    rng = random.Random(0)
    for kind in ("recite", "continue", "cloze", "paraphrase"):
        assert text_turn(kind, "salt", rng) is None
    assert quizzed("salt", rng) is None


def test_a_text_without_spaces_is_cut_between_characters() -> None:
    found = text_turn("recite", "盐湖城的风景很美" * 20, random.Random(1))
    assert found is not None
    assert 16 <= len(found.answer) <= 40


def test_a_question_is_asked_for_and_checked() -> None:
    said = question_prompt(SENTENCE, "1874")
    assert [m.role for m in said] == ["user", "assistant"] * 4 + ["user"]
    assert said[-1].content.startswith(f"Text: {SENTENCE}\nAnswer: 1874\n")
    assert question_fault("When were the pans sold?", "1874") is None
    assert question_fault("The pans were sold.", "1874") == "no_question"
    assert question_fault("Why?\nBecause?", "1874") == "no_question"
    assert question_fault("What was sold in 1874?", "1874") == "answer_inside"
