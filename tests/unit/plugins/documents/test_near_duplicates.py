"""Doubles between training prompts and questions: by hand, and against all pairs compared."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.plugins.documents.filters import jaccard, normalised, shingles
from cartridge_forge.plugins.documents.near_duplicates import LocatedText, PromptOverlap, overlaps

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
