"""Questions of SQuAD's and LongHealth's shapes: whose document, which answers are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocols.errors import DataError
from training.recipes.question_files import f1, normalised, read_questions

TEXTS = {
    "salt": "A pond took nine days to dry in June\nand fourteen in April.",
    "mill": "The tower is forty metres high.",
}
SQUAD: dict[str, Any] = {
    "version": "1.1",
    "data": [
        {
            "title": "Salt making",
            "paragraphs": [
                {
                    "context": "A pond took nine days to dry in June and fourteen in April.",
                    "qas": [
                        {
                            "id": "a",
                            "question": "How long in June?",
                            "answers": [{"text": "nine days", "answer_start": 12}, {"text": "9"}],
                        },
                        {"id": "b", "question": "Who?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        },
        {
            "title": "mill",
            "paragraphs": [
                {
                    "context": "",
                    "qas": [{"question": "How high?", "answers": [{"text": "forty metres"}]}],
                }
            ],
        },
    ],
}
OPTIONS = {f"answer_{x}": t for x, t in zip("abcde", ["9", "14", "9", "21", "30"], strict=True)}
LONGHEALTH: dict[str, Any] = {
    "salt": {
        "name": "-", "birthday": "-", "diagnosis": "-", "texts": {"text_0": "A pond took."},
        "questions": [{"No": 0, "question": "Days in June?", "correct": "9", **OPTIONS}],
    }
}  # fmt: skip


def write(folder: Path, content: Any) -> str:
    path = folder / "questions.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_answers_are_compared_as_squad_does() -> None:
    assert normalised("The  Nine, days!") == "nine days"
    assert f1("nine days", "nine days in June") == pytest.approx(2 * 2 / (2 + 4))
    assert f1("nine nine", "nine") == pytest.approx(2 * 1 / 3)
    assert f1("", "the") == 1.0
    assert f1("", "nine") == 0.0


def test_squad(tmp_path: Path) -> None:
    june, high = read_questions(write(tmp_path, SQUAD), TEXTS, "")
    assert (june.id, june.document, june.text) == ("a", "salt", "How long in June?")
    assert june.answers == ("nine days", "9")
    assert (high.id, high.document) == ("1/0/0", "mill")
    assert june.scores("Nine days.") == (1.0, 1.0, True)
    assert june.scores("It took long. The answer is: 9") == (1.0, 1.0, True)
    assert june.scores("nine or ten days") == (0.0, pytest.approx(2 * 2 / (4 + 2)), True)
    assert june.scores("...") == (0.0, 0.0, False)


def test_the_best_of_several_answers_counts(tmp_path: Path) -> None:
    june, _ = read_questions(write(tmp_path, SQUAD), TEXTS, "")
    # Against "nine days" 2 of 4 words are said, 2 of 2 are met: 2 * 2 / (4 + 2); against "9" none.
    assert june.scores("about nine dry days") == (0.0, pytest.approx(2 / 3), True)
    assert june.scores("The 9!") == (1.0, 1.0, True)
    assert june.scores("a fortnight") == (0.0, 0.0, True)


def test_what_cannot_be_answered_wants_to_be_declined(tmp_path: Path) -> None:
    path = write(tmp_path, SQUAD)
    june, who, _ = read_questions(path, TEXTS, "", unanswerable=True)
    assert (june.id, who.id, who.answers, who.choice) == ("a", "b", (), None)
    for said in ("", "Unanswerable.", "The text doesn't say.", "The answer is: not stated",
                 "I don't know.", "No answer"):  # fmt: skip
        assert who.scores(said) == (1.0, 1.0, True), said
    for said in ("The miller.", "It is known as salt", "No one"):
        assert who.scores(said) == (0.0, 0.0, True), said
    # Declining is no answer to a question that has one, and one of marks alone has none.
    assert june.scores("Unanswerable.") == (0.0, 0.0, True)
    paragraph = {"context": "", "qas": [{"question": "?", "answers": [{"text": "The"}]}]}
    empty = {"data": [{"title": "mill", "paragraphs": [paragraph]}]}
    (one,) = read_questions(write(tmp_path, empty), TEXTS, "", unanswerable=True)
    assert one.answers == ()


def test_longhealth_with_an_option_twice(tmp_path: Path) -> None:
    (days,) = read_questions(write(tmp_path, LONGHEALTH), TEXTS, "Say answer.")
    assert (days.document, days.id) == ("salt", "salt/0")
    assert days.text == "Days in June? options: a) 9 b) 14 c) 9 d) 21 e) 30\nSay answer."
    assert days.scores("answer: a") == days.scores("The answer is c.") == (1.0, 1.0, True)
    assert days.scores("answer: 14") == (0.0, 0.0, True)
    assert days.scores("no idea") == (0.0, 0.0, False)


@pytest.mark.parametrize(
    ("response", "exact", "score"),
    [
        ("The answer is 9.", 1.0, 1.0),
        ("answer: a", 1.0, 1.0),
        ("answer: c) 9", 1.0, 1.0),
        ("answer: 9 days", 0.0, 2 * 1 / (2 + 1)),
        ("answer: 14", 0.0, 0.0),
        ("9", 0.0, 0.0),  # it names no option
    ],
)
def test_words_of_an_option(tmp_path: Path, response: str, exact: float, score: float) -> None:
    (days,) = read_questions(write(tmp_path, LONGHEALTH), TEXTS, "")
    assert days.words(response) == (exact, pytest.approx(score))


def test_one_document_takes_all_questions(tmp_path: Path) -> None:
    other = {"patient_07": LONGHEALTH["salt"]}
    (found,) = read_questions(write(tmp_path, other), {"mill": TEXTS["mill"]}, "")
    assert found.document == "mill"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"patient_07": LONGHEALTH["salt"]}, "patient_07 is the name of no document: salt, mill"),
        ({"data": [{"title": "x", "paragraphs": [{"context": "Elsewhere.", "qas": []}]}]},
         r"data\[0\].paragraphs\[0\]: its context stands in no document, and its title 'x'"),
        ({"data": [{"title": "mill"}]}, r"data\[0\] is no article of SQuAD \('paragraphs'\)"),
        ({"data": []}, "has no question that can be answered"),
        ([], "expected an object of patients"),
    ],
)  # fmt: skip
def test_files_of_another_shape(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_questions(write(tmp_path, content), TEXTS, "")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*; check data.questions"):
        read_questions(str(tmp_path / "none.json"), TEXTS, "")
    (tmp_path / "q.json").write_text("{")
    with pytest.raises(DataError, match=r"is not JSON: .*; give SQuAD's or LongHealth's"):
        read_questions(str(tmp_path / "q.json"), TEXTS, "")
    twice = {"data": [SQUAD["data"][0], SQUAD["data"][0]]}
    with pytest.raises(DataError, match="two questions have the id a"):
        read_questions(write(tmp_path, twice), TEXTS, "")
