"""Check the questions of `studies/kinds`: their kinds, spans, passages and words."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import product, takewhile
from typing import Any

import pytest

from cartridge_forge.plugins.documents.study.question_files import read_questions
from cartridge_forge.plugins.evaluate.bench.reading import BenchAnswer
from cartridge_forge.plugins.evaluate.bench.running import BenchRow
from cartridge_forge.protocols.files import REPOSITORY
from studies.kinds.kind_tables import ANSWERABLE, compared

STUDY = REPOSITORY / "studies" / "kinds"
QUESTIONS = STUDY / "questions.json"
TUNED_ON = ("0005-replicas-that-die", "0010-ranks-of-a-trainer")
KINDS = ("words", "other_words", "together", "counting", "whole", "unanswerable")
# Words of every sentence, with which no fact is found.
LITTLE_WORDS = (
    "a about after all also an and any are as at be before by can could did do does ever every for "
    "from get given had has have her his how if in into is it its just many may might more most "
    "must my no not nothing of off on one ones only or other our out over shall she should so some "
    "still such than that the their them then there these they this those to too under up us very "
    "was we were what when where which while who whom whose why will with without would you your "
    "yours"
)
FUNCTION_WORDS = frozenset(LITTLE_WORDS.split())


def texts() -> dict[str, str]:
    """Return every text by its name."""
    files = [*(STUDY / "texts").glob("*.txt")]
    files += [REPOSITORY / "docs" / "adr" / f"{name}.md" for name in TUNED_ON]
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


TEXTS = texts()
ENTRIES: list[tuple[str, dict[str, Any]]] = [
    (article["title"], qa)
    for article in json.loads(QUESTIONS.read_text(encoding="utf-8"))["data"]
    for paragraph in article["paragraphs"]
    for qa in paragraph["qas"]
]


def spaced(text: str) -> str:
    """Return text with single spaces, as the places in QUESTIONS count it."""
    return " ".join(text.split())


def sentences(text: str) -> list[tuple[int, str]]:
    """Return the sentences of a text's paragraphs with their places in its spaced form."""
    found, at = [], 0
    for paragraph in filter(None, map(spaced, re.split(r"\n\s*\n", text))):
        begin = 0
        for end in [m.end() for m in re.finditer(r"[.?!]+[\"')\]]*\s+", paragraph)]:
            found.append((at + begin, paragraph[begin:end]))
            begin = end
        found.append((at + begin, paragraph[begin:]))
        at += len(paragraph) + 1
    return found


SENTENCES = {name: sentences(text) for name, text in TEXTS.items()}


def sentence_at(title: str, place: int) -> tuple[int, str]:
    """Return the sentence of a text that holds a place."""
    return [one for one in SENTENCES[title] if one[0] <= place][-1]


def content_words(text: str) -> set[str]:
    """Return the words of a text that are no function words, in lower case."""
    return set(re.findall(r"[a-z0-9π]{2,}|\d", text.lower())) - FUNCTION_WORDS


def alike(a: str, b: str) -> bool:
    """Return whether two words are equal or may be forms of one stem: the first five letters and
    all but three of each, or the whole of one that has four."""
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))])
    endings = len(a) - common, len(b) - common
    return a == b or (common >= 5 and max(endings) <= 3) or (common >= 4 and min(endings) == 0)


def shared_words(question: str, sentence: str) -> set[str]:
    """Return the content words of a question that a sentence has in some form."""
    pairs = product(content_words(question), content_words(sentence))
    return {word for word, other in pairs if alike(word, other)}


def of_kind(*kinds: str) -> list[Any]:
    """Return the questions of kinds as a test's parameters."""
    return [pytest.param(title, qa, id=qa["id"]) for title, qa in ENTRIES if qa["kind"] in kinds]


def test_words_that_differ_in_their_endings_are_alike() -> None:
    assert alike("machine", "machines")
    assert alike("deciding", "decided")
    assert not alike("state", "stage")
    assert not alike("car", "carry")


def test_eight_texts_and_two_of_ours_have_six_questions_of_each_kind() -> None:
    counts = Counter((title, qa["kind"]) for title, qa in ENTRIES)
    assert set(counts) == set(product(TEXTS, KINDS))
    assert set(counts.values()) == {6}
    assert len(TEXTS) == 10


def test_forge_bench_reads_them_all() -> None:
    read = read_questions(str(QUESTIONS), TEXTS, "", unanswerable=True)
    assert [(q.id, q.document, q.kind) for q in read] == [
        (qa["id"], title, qa["kind"]) for title, qa in ENTRIES
    ]
    assert len({(q.document, q.text) for q in read}) == len(read) == 360


@pytest.mark.parametrize(("title", "qa"), of_kind("words", "other_words"))
def test_a_fact_s_answer_is_a_span(title: str, qa: dict[str, Any]) -> None:
    answer = qa["answers"][0]
    begin, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
    text = spaced(TEXTS[title])
    assert text[begin:end] == answer["text"]
    assert not re.fullmatch(r"\w\w", text[begin - 1 : begin + 1])  # whole words
    assert not re.fullmatch(r"\w\w", text[end - 1 : end + 1])


@pytest.mark.parametrize(("title", "qa"), of_kind("words"))
def test_a_fact_in_the_text_s_words_shares_most_of_them(title: str, qa: dict[str, Any]) -> None:
    _, sentence = sentence_at(title, qa["answers"][0]["answer_start"])
    asked = content_words(qa["question"])
    assert len(shared_words(qa["question"], sentence)) >= len(asked) / 2


@pytest.mark.parametrize(("title", "qa"), of_kind("other_words"))
def test_a_fact_in_other_words_shares_none(title: str, qa: dict[str, Any]) -> None:
    _, sentence = sentence_at(title, qa["answers"][0]["answer_start"])
    assert shared_words(qa["question"], sentence) == set()


@pytest.mark.parametrize(("title", "qa"), of_kind("together"))
def test_two_passages_together_are_two_sentences(title: str, qa: dict[str, Any]) -> None:
    first, *_, last = (sentence_at(title, place)[0] for place in qa["passages"])
    assert first < last < len(spaced(TEXTS[title]))
    assert qa["answers"]


@pytest.mark.parametrize(("title", "qa"), of_kind("counting", "whole"))
def test_other_answers_are_short(title: str, qa: dict[str, Any]) -> None:
    assert qa["answers"]
    assert all(0 < len(answer["text"].split()) <= 14 for answer in qa["answers"])


@pytest.mark.parametrize(("title", "qa"), of_kind("unanswerable"))
def test_what_the_text_does_not_answer_has_no_answer(title: str, qa: dict[str, Any]) -> None:
    assert qa["is_impossible"]
    assert qa["answers"] == []


def test_a_comparison_is_over_texts_and_adjusted_over_kinds() -> None:
    def row(method: str, text: str, *losses: float) -> BenchRow:
        answers = tuple(
            BenchAnswer(f"{text}/{kind}/{i}", kind, loss, 0.0, False, "")
            for kind in ANSWERABLE
            for i, loss in enumerate(losses if kind == "whole" else (1.0, 1.0))
        )
        return BenchRow(text, method, 0, 1.0, 10, 1.0, 0.5, 0.1, 0.5, 0.0, answers)

    rows = [row("attention_matching", "a", 1, 2), row("attention_matching", "b", 1, 1),
            row("attention_matching", "c", 2, 2), row("passages", "a", 3, 2),
            row("passages", "b", 3, 3), row("passages", "c", 5, 5)]  # fmt: skip
    cells = {one[2]: one for one in compared(rows, [("attention_matching", "passages")])}
    # -1, -2 and -3: a mean of -2 with 4.303 / sqrt(3) about it, and p 0.074 five times.
    assert cells["whole"] == ["attention_matching", "passages", "whole", "3", "-2.00",
                              "-4.48 to +0.48", "0.371", "open"]  # fmt: skip
    assert cells["words"][3:] == ["3", "+0.00", "+0.00 to +0.00", "1.000", "open"]
