"""Problems and what texts to them are worth: of the clinic, reasoning_gym and verifiers."""

from __future__ import annotations

from rooms.environments.problems_setup import over

from cartridge_forge.plugins.clinic.text import PatientQuestion
from cartridge_forge.plugins.episodes.environments.problems import clinic_problem
from cartridge_forge.plugins.episodes.spec.problems import ProblemsSpec
from cartridge_forge.plugins.strategies.rsa.records import JudgedCandidate

QUESTION = PatientQuestion(
    "patient_01/7", "patient_01", "what is the ecg?",
    ("ulcer", "edema", "cyst", "polyp", "murmur"), "cyst",
)  # fmt: skip


def test_a_letter_and_its_options_text_are_one_answer() -> None:
    problem = clinic_problem(QUESTION, "be brief")
    assert problem.question.endswith("e) murmur\nbe brief")
    texts = ["the answer is cyst.", "the answer is c.", "the answer is edema.", "hm"]
    judged = over(ProblemsSpec(), lambda p: p.judge(problem, texts))
    assert judged == [
        JudgedCandidate("cyst", 1.0), JudgedCandidate("cyst", 1.0), JudgedCandidate("edema", 0.0),
        JudgedCandidate(None, 0.0),
    ]  # fmt: skip
