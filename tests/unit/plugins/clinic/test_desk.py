"""Test the clinic's desk and the tasks of its tiny models."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest
from rooms.environments.clinic_setup import MODELS
from transformers import AutoModelForCausalLM, AutoTokenizer

from cartridge_forge.plugins.clinic import vocabulary as words
from cartridge_forge.plugins.clinic.desk import (
    DeskCase,
    ShiftState,
    draw_case,
    draw_desk,
    draw_shift,
    reply_in_shift,
)
from cartridge_forge.plugins.clinic.findings import said_parts, says_parts
from cartridge_forge.plugins.clinic.text import aggregation_prompt
from cartridge_forge.protocols.errors import DataError
from models.pretrain import merge_tasks
from models.pretrain.measure import draw_lists
from models.pretrain.merge_tasks import (
    draw_asked,
    draw_candidates,
    draw_turns,
    first_turn,
    leaders,
    merge_turn,
    rows,
)
from models.pretrain.reader_tasks import Difficulty

CASES = (DeskCase("surgeon", "cardiology", 17, "weber"), DeskCase("sodium", "urology", 40, "41"))
FIRST = ("find surgeon in cardiology.", "read note 17.", "answer weber.")
SECOND = ("find sodium in urology.", "read note 40.", "answer 41.")


def played(*texts: str, case_turns: int = 3) -> list[ShiftState]:
    states = [ShiftState()]
    for text in texts:
        states.append(reply_in_shift(CASES, states[-1], text, case_turns))
    return states[1:]


def told(state: ShiftState) -> tuple[str, str, bool, float | None]:
    assert state.reply is not None
    return state.reply.text, state.reply.question, state.reply.done, state.reply.reward


def test_a_shift_of_right_cases_is_rewarded_once() -> None:
    assert [told(s) for s in played(*FIRST, *SECOND)] == [
        ("note 17.", "", False, None),
        ("surgeon weber.", "", False, None),
        ("right.", "what is the sodium?", False, None),
        ("note 40.", "", False, None),
        ("sodium 41.", "", False, None),
        ("right.", "", True, 1.0),
    ]


@pytest.mark.parametrize(
    "wrong",
    [
        ("answer weber.",),  # a right guess, then a wrong case
        ("find sodium in surgery.", "find sodium in urology.", "read note 40."),  # out of time
        ("find sodium in urology.", "read note 40.", "answer 14."),
    ],
)
def test_one_wrong_case_leaves_no_reward(wrong: tuple[str, ...]) -> None:
    last = played(*FIRST, *wrong)[-1]
    assert told(last)[2:] == (True, 0.0)
    assert (last.ended, last.right) == (2, 1)
    last = played(*(t.replace("sodium", "surgeon") for t in wrong), *SECOND)[-1]
    if wrong != ("answer weber.",):
        assert (last.ended, last.right, told(last)[3]) == (2, 1, 0.0)


def test_a_case_that_ends_in_an_error_keeps_its_hint() -> None:
    reply = played("find surgeon in urology.", case_turns=1)[-1].reply
    assert reply is not None
    assert (reply.error_kind, reply.hint_key) == ("missing_record", "where")
    assert reply.hint_facts == {"field": "surgeon", "department": "cardiology"}
    assert (reply.done, reply.reward, reply.question) == (False, None, "what is the sodium?")


def test_a_shift_asks_for_distinct_fields_and_begins_with_the_seed_s_case() -> None:
    desk = draw_desk(3, 1, 6)
    for seed in range(20):
        shift = draw_shift(desk, seed, 6)
        assert shift[0] == draw_case(desk, seed)
        assert {c.field: c.department for c in shift} == dict(desk.handbook)
        assert draw_shift(desk, seed, 6) == shift
        assert draw_shift(desk, seed, 1) == shift[:1]
    for wrong in (0, 7):
        with pytest.raises(DataError, match="a shift has 1 to 6 cases"):
            draw_shift(desk, 0, wrong)


ASKED = {"sodium": "41 mmol", "surgeon": "weber", "ecg": "normal"}
LISTS = [
    "the answer is sodium 41 mmol, surgeon weber, ecg edema.",
    "the answer is sodium 9 mmol, ecg normal.",
    "the answer is sodium 41 mmol, surgeon costa.",
    "the answer is",
]
QUESTION = "what is the sodium? what is the surgeon? what is the ecg?"


@pytest.mark.parametrize(
    ("field", "expected"),
    [("sodium", ["41 mmol"]), ("surgeon", ["weber", "costa"]), ("ecg", ["edema", "normal"]),
     ("mri", [])],
)  # fmt: skip
def test_every_part_has_its_own_vote(field: str, expected: list[str]) -> None:
    assert leaders(LISTS, field) == expected


@pytest.mark.parametrize(
    ("lists", "known", "kind", "answers"),
    [
        (LISTS[:1], {}, "merged", {"sodium 41 mmol, surgeon weber, ecg edema"}),
        # The chart decides whatever candidates say, and votes decide the rest.
        (LISTS, ASKED, "told", {"sodium 41 mmol, surgeon weber, ecg normal"}),
        (LISTS, {"surgeon": "weber", "ecg": "normal"}, "merged",
         {"sodium 41 mmol, surgeon weber, ecg normal"}),
        (LISTS, {"ecg": "normal"}, "tied",
         {f"sodium 41 mmol, surgeon {name}, ecg normal" for name in ("weber", "costa")}),
    ],
)  # fmt: skip
def test_a_merged_answer_by_hand(
    monkeypatch: pytest.MonkeyPatch, lists: list[str], known: dict, kind: str, answers: set[str]
) -> None:
    monkeypatch.setattr(merge_tasks, "draw_candidates", lambda rng, asked: lists)
    turns = [merge_turn(random.Random(i), ASKED, known) for i in range(50)]
    assert {t.kind for t in turns} == {kind}
    assert {t.response for t in turns} == {f"the answer is {a}." for a in answers}
    assert {t.prompt for t in turns} == {aggregation_prompt(QUESTION, lists)}


def test_a_plain_question_is_read_or_guessed() -> None:
    told = first_turn(random.Random(0), ASKED, ASKED)
    assert (told.kind, told.prompt, told.response) == ("findings", QUESTION, says_parts(ASKED))
    turns = [first_turn(random.Random(i), ASKED, {"ecg": "normal"}) for i in range(200)]
    assert {t.kind for t in turns} == {"guess"}
    said = [said_parts(t.response) for t in turns]
    assert {tuple(s) for s in said} == {tuple(ASKED)}
    assert {s["ecg"] for s in said} == {"normal"}
    assert len({s["sodium"] for s in said}) > 50


def test_a_part_of_a_candidate_is_right_wrong_or_missing() -> None:
    rng = random.Random("candidates")
    drawn = [draw_candidates(rng, ASKED) for _ in range(2000)]
    assert {len(d) for d in drawn} == {1, 2, 3, 4}
    said = [said_parts(text) for d in drawn for text in d]
    counts = Counter(
        "missing" if "ecg" not in s else "right" if s["ecg"] == "normal" else "wrong" for s in said
    )
    shares = {name: n / len(said) for name, n in counts.items()}
    # A part is left out at 0.1, and right at 0.3 to 0.95 of the rest.
    assert shares["missing"] == pytest.approx(0.1, abs=0.03)
    assert shares["right"] == pytest.approx(0.9 * 0.625, abs=0.04)


def test_a_sitting_reads_what_its_document_has() -> None:
    rng = random.Random("sittings")
    kinds: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for _ in range(200):
        document, whole, turns = draw_turns(rng, Difficulty((4, 12), 0.6), 1, 2, ["recite"])
        kinds[whole].update(t.kind for t in turns)
        for turn in turns:
            if turn.kind in ("findings", "told"):
                parts = said_parts(turn.response)
                assert all(f" {f} {v.split()[0]}" in document for f, v in parts.items())
    assert set(kinds[True]) == {"recite", "findings", "guess", "told", "merged", "tied"}
    assert set(kinds[False]) >= {"guess", "merged", "tied"}
    assert "recite" not in kinds[False]


def test_a_step_is_with_charts_or_without() -> None:
    args = Namespace(alone=5, batch=3, first=1, merged=2, others=1)
    steps = [list(rows(random.Random(i), 0, args)) for i in range(40)]
    assert {len(step) for step in steps} == {5, 3}
    for step in steps:
        bare = [head == "<|bos|>" for head, _ in step]
        assert all(bare) if len(step) == 5 else not any(bare)
    counts = Counter(len(draw_asked(random.Random(i), {})) for i in range(300))
    assert set(counts) == {2, 3, 4}


@pytest.mark.parametrize(("held", "right", "said"), [("all but one", 3, 4), ("two", 2, 2)])
def test_the_measured_candidates_hold_different_parts(held: str, right: int, said: int) -> None:
    """Four lists: each wrong in another part, or each with two right parts and no more. Every part
    is thus right in three of four lists, or in two."""
    for question, document, candidates in draw_lists(7, 2, 4, False, held, count=3):
        assert document == ""
        lists = [said_parts(c) for c in candidates]
        assert [len(x) for x in lists] == [said] * 4
        for field, value in question.parts.items():
            assert sum(x.get(field) == value for x in lists) == right


def test_the_shipped_merger_has_the_readers_words() -> None:
    merger = MODELS / "clinic-merge"
    config = json.loads((merger / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert sum(f.stat().st_size for f in merger.iterdir()) <= 10_000_000
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (merger / name).read_bytes() == (MODELS / "clinic-reader" / name).read_bytes()


READER = Path(__file__).resolve().parents[4] / "models" / "clinic-reader"


def test_transformers_loads_it_unmodified_and_it_is_small() -> None:
    config = json.loads((READER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config  # no code of ours is needed to load it
    model = AutoModelForCausalLM.from_pretrained(READER, trust_remote_code=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(f.stat().st_size for f in READER.iterdir()) <= 10_000_000


def test_every_value_of_the_clinic_is_one_token_for_it() -> None:
    tokenizer = AutoTokenizer.from_pretrained(READER)
    for category in words.CATEGORIES:
        for word in (*category.fields, *category.values):
            assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
    for remark in words.REMARKS:
        assert len(tokenizer.encode(remark)) == len(remark.split()), remark
