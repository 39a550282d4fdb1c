"""Test which passages support an answer, against what clinic charts say."""

from __future__ import annotations

import random

from cartridge_forge.plugins.clinic.patients import draw_chart, fact_text
from cartridge_forge.plugins.documents.study.support import supporting_passages

TEXT = "The harbour keeps nine boats. It was dredged in 1904.\nForty pear trees stand behind it."


def test_the_best_passage_has_the_words_of_question_and_answer() -> None:
    one, *others = supporting_passages(TEXT, "When was that?", "It was dredged in 1904.")
    assert (one.text, TEXT[one.start : one.stop]) == ("It was dredged in 1904.",) * 2
    assert [other.text for other in others] == ["Forty pear trees stand behind it."]
    assert one.score > others[0].score > 0
    assert supporting_passages(TEXT, "Who?", "Nobody.") == []


def test_of_right_answers_about_charts_the_first_passage_holds_the_fact() -> None:
    """Each of the 80 facts of four charts is asked for by the name of its field."""
    right = 0
    for seed in range(4):
        chart = draw_chart(random.Random(seed), 20, 3, 0.5)
        text = "\n".join(note.text for note in chart.notes)
        for field, value in (fact for note in chart.notes for fact in note.facts):
            answer = f"the {field} is {value}."
            first, *_ = supporting_passages(text, f"what is the {field}?", answer)
            right += first.text == f"{fact_text((field, value))}."
    assert right == 80
