"""Which passages a cartridge recalls: worked by hand over a text of four sentences, and over the
chart that a recorded run was trained on."""

from __future__ import annotations

from pathlib import Path

from recorded_run import answer, recorded_run

from cartridge_forge.plugins.watch.pages.recall import recalled, split_passages, tallied
from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.records.answers import to_row

TEXT = "The dose is 41 mg daily.\nShe has a cough. The pulse is 41 beats.\n\nNothing else."


def row(fact: str, expected: str | None, right: float) -> dict[str, object]:
    return {"fact": fact, "expected": expected, "right": right}


def test_a_question_is_about_the_passage_with_its_right_answer_and_most_of_its_words() -> None:
    passages = split_passages(TEXT)
    assert [line for line, _ in passages] == [0, 1, 1, 3]
    rows = [
        row("what is the dose?", "41 mg", 1.0),
        row("what is the pulse?", "41", 0.0),  # two passages hold 41; one the pulse
        row("the pulse of the patient?", "41 beats", 0.5),
        row("does she cough?", "yes", 1.0),  # none holds yes
        row("whither?", "rome", 1.0),  # about none of them
    ]
    assert tallied(passages, rows) == [(1, 1.0), (1, 1.0), (2, 0.5), (0, 0.0)]


def test_the_chart_of_a_run_is_drawn_again_and_marked(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    view = RunView("r", run.path)
    untold = recalled(view, "patient_01")
    assert untold["why_not"] == "no question was answered yet"
    chart = untold["passages"]
    assert chart[0]["text"].startswith("chart of ")
    asked = next(one["text"] for one in chart if "mmol" in one["text"]).rstrip(".")
    field, value = asked.split(maxsplit=1)
    given = {**to_row(answer(1, 1.0), "on_policy", 4, sampled=False), "cartridge": "patient_01"}
    run.append_answers([{**given, "fact": f"what is the {field}?", "expected": value}])  # type: ignore[typeddict-item]
    told = recalled(view, "patient_01")
    assert [one["text"] for one in told["passages"] if one["asked"]] == [f"{asked}."]
    assert (told["why_not"], told["cut"]) == (None, False)
    assert told["tokens"] > 100
    assert recalled(view, "nobody")["why_not"].endswith("has no cartridge 'nobody'; see its list")
