"""The questions of `make run-real` about three of our own pages, and what they stand on."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from cartridge_forge.plugins.documents.reading import read_documents
from cartridge_forge.plugins.documents.study.question_files import read_questions

ROOT = Path(__file__).parents[4]
QUESTIONS = ROOT / "configs" / "our_docs.json"


def pages() -> list[str]:
    """The pages that the Makefile's target gives, the list of one place."""
    line = re.search(r"^REAL_DOCS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line is not None
    return [str(ROOT / path) for path in line[1].split()]


def test_each_answer_is_a_span_of_its_page() -> None:
    texts = {d.name: d.text for d in read_documents(pages()).documents}
    found = read_questions(str(QUESTIONS), texts, "", {name: name for name in texts})
    assert Counter(q.document for q in found) == dict.fromkeys(texts, 20)
    assert len({q.text for q in found}) == 60
    spaced = {name: " ".join(text.split()) for name, text in texts.items()}
    lacking = [q.id for q in found for a in q.answers if a not in spaced[q.document]]
    assert lacking == []
