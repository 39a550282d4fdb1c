"""Questions of SQuAD's and LongHealth's shapes: whose document, which answers are right."""

import json
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.documents.study.question_files import (
    UserQuestion,
    read_question_file,
    read_questions,
)
from cartridge_forge.protocols.errors import DataError

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
    # Declining is no answer to a question that has one.
    assert june.scores("Unanswerable.") == (0.0, 0.0, True)


@pytest.mark.parametrize("answer", ["A", "The", "+", "-", "a.", "%", "A+", "#", "\u00b1", "..."])
def test_answers_of_which_normalisation_leaves_nothing(tmp_path: Path, answer: str) -> None:
    paragraph = {"context": "", "qas": [{"question": "Which?", "answers": [{"text": answer}]}]}
    content = {"data": [{"title": "mill", "paragraphs": [paragraph]}]}
    for unanswerable in (False, True):
        (one,) = read_questions(write(tmp_path, content), TEXTS, "", unanswerable=unanswerable)
        assert one.answers == (answer,)
    assert one.scores(answer) == (1.0, 1.0, True)
    assert one.scores("The text does not say.")[:2] == (0.0, 0.0)
    assert one.scores("")[:2] == (0.0, 0.0)


def test_blank_answers_are_none(tmp_path: Path) -> None:
    paragraph = {"context": "", "qas": [{"question": "Which?", "answers": [{"text": " "}]}]}
    content = {"data": [{"title": "mill", "paragraphs": [paragraph]}]}
    (one,) = read_questions(write(tmp_path, content), TEXTS, "", unanswerable=True)
    assert one.answers == ()


@pytest.mark.parametrize(
    ("response", "declined"),
    [
        ("No answer is given in the text.", 1.0),
        ("The answer isn't in the text.", 1.0),
        ("The answer isn\u2019t in the text.", 1.0),
        ("The answer is not stated.", 1.0),
        ("Answer: unanswerable", 1.0),
        ("The text does not say it in words. The answer is forty.", 0.0),
        ("I do not know. Answer: 9", 0.0),
    ],
)
def test_declining_as_an_answer(response: str, declined: float) -> None:
    assert UserQuestion("x", "mill", "How high?").scores(response)[0] == declined


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


A = "Ward A. Visits: daily from two to four. The head is Dr Ruhl."
B = "Ward B. Visits: daily from two to four. The head is Dr Okafor."
LONG = {
    "long.part_01": A,
    "long.part_02": B,
    "c": "The caf\u00e9\u2019s menu has nine dishes in all.",
}
OF = {"long.part_01": "long", "long.part_02": "long", "c": "c"}


def squad(*articles: tuple[str, str]) -> dict[str, Any]:
    """Return a file with a question on each (title, context), answered by "Dr Okafor"."""
    answers = [{"text": "Dr Okafor", "answer_start": 0}]
    return {
        "data": [
            {"title": title, "paragraphs": [{"context": context, "qas": [
                {"id": str(i), "question": "Who is the head?", "answers": answers}]}]}
            for i, (title, context) in enumerate(articles)
        ]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("title", "context", "document"),
    [
        ("b", "Visits: daily from two to four.", "b"),  # it stands in both
        ("a", "Visits: daily from two to four.", "a"),
        ("b", "Ward", "b"),
        ("", "The head is Dr Okafor.", "b"),
        ("Hospitals", "The  head is\nDr Ruhl", "a"),
        ("b", "words of no document", "b"),
        ("B", "", "b"),
        ("b.txt", "", "b"),
        ("notes/b.txt", "Visits: daily from two to four.", "b"),
        (r"notes\b.txt", "Visits: daily from two to four.", "b"),
        ("", "Ward A. Visits: daily from two to four. The head is: Dr Ruhle", "a"),  # nearly
        ("a", "The head is Dr Okafor.", "a"),  # the title decides
    ],
)
def test_a_question_has_the_document_of_its_title_or_words(
    tmp_path: Path, title: str, context: str, document: str
) -> None:
    path = write(tmp_path, squad((title, context)))
    (found,) = read_questions(path, {"a": A, "b": B}, "")
    assert found.document == document
    (found,) = read_questions(path, {"notes/a.txt": A, "notes/b.txt": B}, "")
    assert found.document == f"notes/{document}.txt"


@pytest.mark.parametrize(
    ("title", "context", "chunk"),
    [
        ("long", "The head is Dr Okafor.", "long.part_02"),
        ("long", "other words", "long.part_01"),
        ("Long", "", "long.part_01"),
        ("", "Visits: daily from two to four.", "long.part_01"),  # in both chunks, of one document
        ("", f"{A} {B}", "long.part_02"),  # over the border: the chunk with the answer
        ("", "The head is Dr Ruhl. Ward B. Visits: daily from two to four.", "long.part_02"),
        ("", "The caf\u00e9's menu has nine dishes", "c"),
        ("c", "Ward B.", "c"),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_chunks_and_parts(
    tmp_path: Path, title: str, context: str, chunk: str, split: bool
) -> None:
    owners = {name: name for name in LONG} if split else OF
    path = write(tmp_path, squad((title, context)))
    if split and title == "" and context.startswith(("Visits", "The head is Dr Ruhl. Ward", A)):
        with pytest.raises(DataError, match=r"\[0\]: its context stands in "):
            read_questions(path, LONG, "", owners)
        return
    (found,) = read_questions(path, LONG, "", owners)
    assert found.document == chunk


@pytest.mark.parametrize("count", [1, 2])
def test_questions_about_other_texts_are_left_out(tmp_path: Path, count: int) -> None:
    others = [("zebra", "Zebras live in herds."), ("lion", "Lions hunt at night."), ("", "x")]
    path = write(tmp_path, squad(("Wards", "The head is Dr Ruhl."), *others))
    texts = dict(list({"a": A, "mill": TEXTS["mill"]}.items())[:count])
    read = read_question_file(path, texts, "")
    assert [(q.id, q.document) for q in read.questions] == [("0", "a")]
    assert read.notes == (
        "3 of 4 questions are left out: their context stands in no document, and their title names "
        "none (zebra, lion, no title)",
    )
    with pytest.raises(DataError, match=r"of the run; data\[0\].paragraphs\[0\]: its context"):
        read_questions(write(tmp_path, squad(*others)), texts, "")


def test_what_stands_in_two_documents_is_told(tmp_path: Path) -> None:
    both = ("Visits", "Visits: daily from two to four.")
    path = write(tmp_path, squad(both, ("a", "The head is Dr Okafor."), ("b", "Ward B.")))
    read = read_question_file(path, {"a": A, "b": B}, "")
    assert [(q.id, q.document) for q in read.questions] == [("1", "a"), ("2", "b")]
    assert read.notes == (
        "1 of 3 questions are left out: their context stands in a, b, and their title names none "
        "(Visits)",
        "1 of 3 questions follow their title, and their context is that of b (a)",
    )
    with pytest.raises(DataError, match="its context stands in a, b, and its title 'Visits'"):
        read_questions(write(tmp_path, squad(both)), {"a": A, "b": B}, "")


def test_a_question_that_says_nothing_is_about_the_only_document(tmp_path: Path) -> None:
    path = write(tmp_path, squad(("", "")))
    (found,) = read_questions(path, {"mill": TEXTS["mill"]}, "")
    assert found.document == "mill"
    with pytest.raises(DataError, match="its context stands in no document, and its title ''"):
        read_questions(path, TEXTS, "")


def patient(*questions: tuple[str, str], notes: str = "n", **more: Any) -> dict[str, Any]:
    """Return a patient of LongHealth's form with (question, right option)."""
    return {
        "name": "x", "birthday": "y", "diagnosis": "z", "texts": {"text_0": notes},
        "questions": [
            {"No": i, "question": text, "answer_a": right, "answer_b": "w", "answer_c": "x",
             "answer_d": "y", "answer_e": "z", "correct": right, **more}
            for i, (text, right) in enumerate(questions)
        ],
    }  # fmt: skip


def test_longhealths_options_are_found_as_words(tmp_path: Path) -> None:
    chunks = {
        "long#1": "November: ramipril 25 mg and 2.5 mg daily, no 15 mmol. Stage IIIa. 1,250 ml.",
        "long#2": "Aspirin 5 mg daily. Allergies: No. Potassium 5 mmol. Stage III. 250 ml. A+ (B).",
    }
    options = ["5 mg", "No", "5 mmol", "Stage III", "III", "250 ml", "250", "A+", "(B)", "aspirin"]
    content = {"long": patient(*((f"{o}?", o) for o in options))}
    found = read_questions(write(tmp_path, content), chunks, "", dict.fromkeys(chunks, "long"))
    assert {q.document for q in found} == {"long#2"}
    (none,) = read_questions(
        write(tmp_path, {"long": patient(("?", "9 mg"))}), chunks, "", dict.fromkeys(chunks, "long")
    )
    assert none.document == "long#1"


def test_longhealths_place_of_an_answer_decides_before_its_words(tmp_path: Path) -> None:
    notes = "Aspirin 5 mg was given at nine. Later the ward gave ramipril 5 mg at ten."
    chunks = {"p#1": notes[:32], "p#2": notes[32:]}
    place = {"text_0": {"start": [32 / len(notes)], "end": [1]}}
    content = {"p": patient(("Ramipril?", "5 mg"), notes=notes, answer_location=place)}
    (found,) = read_questions(write(tmp_path, content), chunks, "", dict.fromkeys(chunks, "p"))
    assert found.document == "p#2"


def test_longhealths_patients_of_other_documents_are_left_out(tmp_path: Path) -> None:
    mine = patient(("Who?", "Dr Ruhl"), notes="Visits: daily from two to four. The head")
    other = patient(("Who?", "Dr Ruhl"), notes="Zebras live in herds of nine or ten animals.")
    read = read_question_file(write(tmp_path, {"p1": mine, "p2": other}), {"a": A}, "")
    assert [(q.id, q.document) for q in read.questions] == [("p1/0", "a")]
    assert read.notes[0].startswith("1 of 2 questions are left out")
    with pytest.raises(DataError, match="p2 is the name of no document: a"):
        read_questions(write(tmp_path, {"p2": other}), {"a": A}, "")


QUALITY = {"article": "x", "questions": [{"question": "?", "options": ["a"], "gold_label": 1}]}
QASPER = {"1909.00694": {"title": "x", "abstract": "y", "full_text": [], "qas": []}}


@pytest.mark.parametrize(
    "content",
    [
        QUALITY, [QUALITY], QASPER, [QASPER], [{"question": "?", "answer": "x"}], [], {}, 7, "x",
        {"data": [{"question": "?", "answer": "x"}]}, {"data": {"title": "x"}},
        {"questions": [{"question": "?", "answers": ["x"]}]}, {"data": []},
        {"data": [{"title": "a", "paragraphs": [{"context": "", "qas": [
            {"question": "?", "answers": {"text": ["x"]}}]}]}]},
    ],
)  # fmt: skip
def test_files_of_other_forms_are_told_squads(tmp_path: Path, content: Any) -> None:
    with pytest.raises(DataError, match=r'SQuAD\'s shape is {"data": .*"paragraphs": .*"qas": '):
        read_questions(write(tmp_path, content), TEXTS, "")


def test_lines_of_json_are_told_squads_form(tmp_path: Path) -> None:
    line = json.dumps(QUALITY)
    (tmp_path / "q.json").write_text(f"{line}\n{line}\n")
    with pytest.raises(DataError, match=r"is not JSON: Extra data.*SQuAD's shape is"):
        read_questions(str(tmp_path / "q.json"), TEXTS, "")


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
