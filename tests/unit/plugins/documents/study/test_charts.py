"""Charts in chunks: every note once, at notes and sentences, and prompts find their chunks."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import Patient, PatientQuestion, parse_patients
from cartridge_forge.plugins.documents.study.longhealth import (
    ChartChunk,
    chart_chunks,
    chunks_holding,
)
from cartridge_forge.protocols.errors import DataError

ROOT = Path(__file__).resolve().parents[5]
TOKENIZER = load_tokenizer(str(ROOT / "models" / "clinic-reader"))


@pytest.fixture(scope="module")
def patient() -> Patient:
    (found,) = parse_patients(generate_clinic(3, 1, 32, 4), "clinic")
    return found


def count(text: str) -> int:
    return len(TOKENIZER(text, add_special_tokens=False).input_ids)


def test_a_chart_that_fits_is_one_chunk(patient: Patient) -> None:
    whole = tuple((i, 0, len(text)) for i, text in enumerate(patient.texts))
    for most in (None, count(patient.document)):
        assert chart_chunks(patient, TOKENIZER, most, 0) == [
            ChartChunk("patient_01", patient.document, whole)
        ]


@pytest.mark.parametrize("most", [45, 80, 110, 200])
def test_chunks_hold_the_chart_once(patient: Patient, most: int) -> None:
    found = chart_chunks(patient, TOKENIZER, most, 0)
    assert [c.name for c in found] == [f"patient_01.part_{i:02}" for i in range(1, len(found) + 1)]
    assert len(found) > 1
    assert all(count(c.text) <= most for c in found)
    head = patient.document.partition("\n")[0]
    assert all(c.text.startswith(f"{head}\nnote ") for c in found)
    for note, text in enumerate(patient.texts):
        spans = [(a, b) for c in found for i, a, b in c.spans if i == note]
        assert (spans[0][0], spans[-1][1]) == (0, len(text))
        assert all(left[1] == right[0] for left, right in itertools.pairwise(spans))
    for chunk in found:
        for note, start, stop in chunk.spans:
            assert f"note {note + 1}: {patient.texts[note][start:stop].strip()}" in chunk.text
            # Cut between notes, or else between sentences.
            assert patient.texts[note][:start].rstrip()[-1:] in ("", ".")


def test_chunks_overlap_where_asked(patient: Patient) -> None:
    found = chart_chunks(patient, TOKENIZER, 110, 20)
    for before, after in itertools.pairwise(found):
        note, _, stop = before.spans[-1]
        assert after.spans[0][:2] < (note, stop)


def test_no_room_beside_the_head_is_refused(patient: Patient) -> None:
    with pytest.raises(DataError, match=r"no room beside the head of patient_01's chart; raise"):
        chart_chunks(patient, TOKENIZER, 8, 0)


def test_the_chunks_of_a_passage_by_hand() -> None:
    chunks = [
        ChartChunk("p.1", "", ((0, 0, 50), (1, 0, 20))),
        ChartChunk("p.2", "", ((1, 10, 60),)),
        ChartChunk("p.3", "", ((1, 60, 90), (2, 0, 30))),
    ]
    assert chunks_holding(chunks, [(0, 3, 9)]) == ("p.1",)
    assert chunks_holding(chunks, [(1, 12, 18)]) == ("p.1",), "the first of two that hold it"
    assert chunks_holding(chunks, [(1, 15, 25)]) == ("p.2",), "in part in the first, whole in this"
    assert chunks_holding(chunks, [(1, 55, 65)]) == ("p.2", "p.3"), "cut apart: both"
    assert chunks_holding(chunks, [(2, 0, 30), (0, 0, 50)]) == ("p.1", "p.3"), "in their order"


def test_every_question_of_the_clinic_is_answered_in_its_chunk(patient: Patient) -> None:
    """By the passages that the file names, and without them by the right option's words."""
    found = chart_chunks(patient, TOKENIZER, 80, 0)
    texts = {c.name: c.text for c in found}
    met = set()
    for question in patient.questions:
        fact = question.text.removeprefix("what is the ").removesuffix("?")
        (name,) = chunks_holding(found, patient.places_of(question))
        assert f"{fact} {question.correct}." in texts[name]
        met.add(name)
        unplaced = replace(question, places=())
        told = chunks_holding(found, patient.places_of(unplaced))
        assert any(question.correct in texts[name] for name in told)
    assert met == set(texts)


def test_an_answer_that_is_nowhere_is_about_the_whole_chart() -> None:
    question = PatientQuestion("p/0", "p", "why?", ("a", "b", "c", "d", "e."), "e.")
    patient = Patient("p", "n", "b", "d", ("first.", "second e."), (question,))
    assert patient.places_of(question) == ((1, 0, 9),)
    bare = replace(patient, texts=("fist.", "thirty"))
    assert bare.places_of(question) == ((0, 0, 5), (1, 0, 6))
