"""LongHealth's schema: what we write we read, the real file's oddities, every refusal's words."""

import copy
import functools
import http.server
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.plugins.clinic.patients import generate_clinic
from cartridge_forge.plugins.clinic.text import (
    Patient,
    contains_words,
    load_patients,
    parse_patients,
)
from cartridge_forge.protocols.errors import DataError

# Shaped like the real file: long texts of several paragraphs, more than ten of them, JSON order
# that is not reading order, and one question whose right text stands at two letters.
REAL: dict[str, Any] = {
    "patient_01": {
        "name": "Anna Sample",
        "birthday": "1970-10-01",
        "diagnosis": "Multiple Myeloma",
        "texts": {
            "text_0": "**Dear colleague,**\n\nwe report on her.\n\n**Labs:**\n\nHb 9.1 g/dL\n",
            "text_1": "**Dear colleague,**\n\nsecond letter.",
            "text_10": "eleventh letter.",
            "text_2": "third letter.",
        },
        "questions": [
            {
                "No": 0,
                "question": "Which regimen was given?",
                "answer_a": "VCD",
                "answer_b": "VRd",
                "answer_c": "KRd",
                "answer_d": "VRd",
                "answer_e": "None of the above",
                "correct": "VRd",
                "answer_location": {"text_0": {"start": [0.25], "end": [0.5]}},
            },
            {
                "No": 1,
                "question": "What was the hemoglobin?",
                "answer_a": "9.1 g/dL",
                "answer_b": "8.1 g/dL",
                "answer_c": "7.1 g/dL",
                "answer_d": "6.1 g/dL",
                "answer_e": "5.1 g/dL",
                "correct": "9.1 g/dL",
                "answer_location": {"text_0": {"start": [0.8, 0.9], "end": [0.85, 1.0]}},
            },
        ],
    }
}


def write(folder: Path, content: Any) -> str:
    path = folder / "benchmark_v5.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a server on loopback that serves `tmp_path`."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_generated_clinic_survives_a_file(tmp_path: Path) -> None:
    clinic = generate_clinic(seed=3, patients=4, facts=12, notes=3)
    loaded = load_patients(write(tmp_path, clinic))
    assert loaded == parse_patients(clinic, "memory")
    assert [p.id for p in loaded] == ["patient_01", "patient_02", "patient_03", "patient_04"]
    for patient, record in zip(loaded, clinic.values(), strict=True):
        assert list(patient.texts) == [record["texts"][f"text_{i}"] for i in range(3)]
        assert [q.id for q in patient.questions] == [f"{patient.id}/{i}" for i in range(12)]
        assert [q.text for q in patient.questions] == [q["question"] for q in record["questions"]]


def test_a_file_in_the_real_shape(tmp_path: Path) -> None:
    (patient,) = load_patients(write(tmp_path, REAL))
    texts = REAL["patient_01"]["texts"]
    assert patient.texts == tuple(texts[f"text_{i}"] for i in (0, 1, 2, 10)), "not JSON's order"
    assert patient.document == (
        "chart of Anna Sample, born 1970-10-01, diagnosis Multiple Myeloma.\n"
        f"note 1: {texts['text_0']}\nnote 2: {texts['text_1']}\n"
        "note 3: third letter.\nnote 4: eleventh letter."
    )
    regimen, hemoglobin = patient.questions
    assert (regimen.id, regimen.patient) == ("patient_01/0", "patient_01")
    assert regimen.options == ("VCD", "VRd", "KRd", "VRd", "None of the above")
    assert [regimen.is_correct(letter) for letter in "abcde"] == [False, True, False, True, False]
    assert [hemoglobin.is_correct(letter) for letter in "abcde"] == [True] + [False] * 4


def test_numbers_where_the_schema_has_texts_are_read_as_texts() -> None:
    """Written by hand, `"answer_a": 9.1` and a numeric birthday are what one gets."""
    record = copy.deepcopy(REAL)
    record["patient_01"]["birthday"] = 1970
    record["patient_01"]["questions"][1] |= {"answer_a": 9.1, "correct": 9.1}
    (patient,) = parse_patients(record, "hand.json")
    assert patient.birthday == "1970"
    assert patient.questions[1].is_correct("a")


SCHEMA = (
    "; LongHealth's schema has name, birthday, diagnosis, texts and questions "
    "(No, question, answer_a..answer_e, correct)"
)
START = "; LongHealth's file starts with {'patient_01': {...}}"


@pytest.mark.parametrize("key", ["texts", "name", "birthday", "diagnosis", "questions"])
def test_a_patient_without_a_key(tmp_path: Path, key: str) -> None:
    broken = copy.deepcopy(REAL)
    del broken["patient_01"][key]
    path = write(tmp_path, broken)
    with pytest.raises(DataError) as caught:
        load_patients(path)
    assert str(caught.value) == f"{path}: patient_01 has no '{key}'{SCHEMA}"


@pytest.mark.parametrize("key", ["No", "question", "answer_a", "answer_e", "correct"])
def test_a_question_without_a_key(tmp_path: Path, key: str) -> None:
    broken = copy.deepcopy(REAL)
    del broken["patient_01"]["questions"][1][key]
    path = write(tmp_path, broken)
    with pytest.raises(DataError) as caught:
        load_patients(path)
    assert str(caught.value) == f"{path}: patient_01 has no '{key}'{SCHEMA}"


def _letter_for_text(record: dict[str, Any]) -> None:
    record["questions"][1]["correct"] = "a"


def _no_notes(record: dict[str, Any]) -> None:
    record["texts"] = {}


def _texts_in_a_list(record: dict[str, Any]) -> None:
    record["texts"] = ["first", "second"]


def _question_is_text(record: dict[str, Any]) -> None:
    record["questions"] = ["Which regimen was given?"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            _letter_for_text,
            "patient_01: question 1: correct is 'a', which is none of its five options",
        ),
        (_no_notes, "patient_01: texts is empty: a patient needs a note to be asked about"),
        (
            _texts_in_a_list,
            "patient_01 is malformed: list indices must be integers or slices, not str",
        ),
        (
            _question_is_text,
            "patient_01 is malformed: string indices must be integers, not 'str'",
        ),
    ],
)
def test_a_malformed_patient(tmp_path: Path, spoil: Any, message: str) -> None:
    broken = copy.deepcopy(REAL)
    spoil(broken["patient_01"])
    path = write(tmp_path, broken)
    with pytest.raises(DataError) as caught:
        load_patients(path)
    assert str(caught.value) == f"{path}: {message}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", f": expected an object of patients, got list{START}"),
        ("{}", f": expected an object of patients, got dict{START}"),
        ('"patient_01"', f": expected an object of patients, got str{START}"),
        ("null", f": expected an object of patients, got NoneType{START}"),
        (
            "<html>",
            " is not JSON: Expecting value: line 1 column 1 (char 0); expected benchmark_v5.json",
        ),
        (
            "",
            " is not JSON: Expecting value: line 1 column 1 (char 0); expected benchmark_v5.json",
        ),
        (
            '{"patient_01": {',
            " is not JSON: Expecting property name enclosed in double quotes: line 1 column 17 "
            "(char 16); expected benchmark_v5.json",
        ),
        ('{"patient_01": []}', ": patient_01 is malformed: list indices must be integers or "
         "slices, not str"),
        ('{"patient_01": null}', ": patient_01 is malformed: 'NoneType' object is not "
         "subscriptable"),
    ],
)  # fmt: skip
def test_a_file_that_is_something_else(tmp_path: Path, content: str, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(DataError) as caught:
        load_patients(path)
    assert str(caught.value) == path + message


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "benchmark_v5.json"
    path.write_bytes(b"\x80\x02}q\x00.")  # a pickle
    with pytest.raises(DataError, match="is not JSON: 'utf-8' codec can't decode byte 0x80"):
        load_patients(str(path))


def test_a_path_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_patients(f"{tmp_path}/none.json")
    assert str(caught.value) == (
        f"cannot read {tmp_path}/none.json: No such file or directory; check data.path"
    )
    with pytest.raises(DataError) as caught:
        load_patients(str(tmp_path))
    assert str(caught.value) == f"cannot read {tmp_path}: Is a directory; check data.path"


def test_a_url_is_read_like_a_path(tmp_path: Path, served: str) -> None:
    path = write(tmp_path, REAL)
    fetched: list[Patient] = load_patients(f"{served}/benchmark_v5.json")
    assert fetched == load_patients(path)


def test_a_file_that_the_server_does_not_have(served: str) -> None:
    with pytest.raises(DataError) as caught:
        load_patients(f"{served}/v6.json")
    assert str(caught.value) == (
        f"cannot fetch {served}/v6.json: HTTP Error 404: File not found; "
        "download it once and give data.path its path"
    )


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/benchmark_v5.json"
        with pytest.raises(DataError) as caught:
            load_patients(url)
    assert str(caught.value) == (
        f"cannot fetch {url}: <urlopen error [Errno 111] Connection refused>; "
        "download it once and give data.path its path"
    )


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://", "<urlopen error no host given>"),
        ("http://[::1/x.json", "Invalid IPv6 URL"),
        ("http://127.0.0.1:port/x.json", "nonnumeric port: 'port'"),
    ],
)
def test_a_url_that_is_none(url: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(DataError) as caught:
        load_patients(url)
    assert str(caught.value) == (
        f"cannot fetch {url}: {reason}; download it once and give data.path its path"
    )


@pytest.mark.parametrize(
    ("text", "words", "held"),
    [
        ("Aspirin 5 mg daily.", "5 mg", True),
        ("Aspirin 25 mg daily.", "5 mg", False),
        ("Aspirin 2.5 mg daily.", "5 mg", False),
        ("Aspirin 1,5 mg daily.", "5 mg", False),
        ("Aspirin 5 mg, then 25 mg.", "5 mg", True),
        ("Aspirin 25 mg, then 5 mg.", "5 mg", True),
        ("in November", "No", False),
        ("Allergies: No.", "No", True),
        ("Stage IIIa", "III", False),
        ("1.250 ml", "1", False),
        ("group A+ (B)", "A+", True),
        ("group (B)", "(B)", True),
        ("he takes it", "", False),
        ("\u6bcf\u65e5\u963f\u53f8\u5339\u67975 mg\u670d\u7528", "5 mg", True),
        ("\u60a3\u8005\u4f4f\u5728\u5317\u4eac\u5e02", "\u5317\u4eac", True),
    ],
)
def test_words_are_whole(text: str, words: str, held: bool) -> None:
    assert contains_words(text, words) is held


@pytest.mark.parametrize("value", [None, " ", ["a"]])
def test_a_value_that_is_no_text_is_refused_by_its_place(value: Any) -> None:
    question = {"No": 3, "question": "q?", "correct": "a"}
    question |= {f"answer_{letter}": letter for letter in "abcde"}
    record = {
        "name": "n", "birthday": "1", "diagnosis": "d", "texts": {"text_0": "x"},
        "questions": [question],
    }  # fmt: skip
    assert parse_patients({"patient_01": record}, "f.json")[0].questions[0].correct == "a"
    for broken, place in (
        (record | {"texts": {"text_0": value}}, "text_0"),
        (record | {"diagnosis": value}, "diagnosis"),
        (record | {"questions": [question | {"answer_b": value}]}, "question 3: answer_b"),
        (record | {"questions": [question | {"question": value}]}, "question 3: question"),
    ):
        with pytest.raises(DataError, match=rf"f.json: patient_01: {place} is .*expected a text"):
            parse_patients({"patient_01": broken}, "f.json")
