"""Votes: the tables by hand, and that neither order nor abstentions change what is counted."""

import json
from typing import Any

import pytest
from replay_setup import STATE, a_state, canonical_read, votes

from cartridge_forge.plugins.chat.messages import (
    OptionAction,
    ReplayState,
    TeacherUsage,
    TeacherVote,
    TextAction,
    ToolAction,
)
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.spec import GateSpec
from cartridge_forge.plugins.replay.vote_records import Record, from_row, to_row
from cartridge_forge.plugins.replay.voting import decide, next_to_ask, pair_of, worth_asking
from cartridge_forge.protocols.errors import DataError


@pytest.mark.parametrize(
    ("notes", "quorum", "reason", "chosen"),
    [
        ((1, 1, 2), 2, "pair", 1),
        ((1, 1), 2, "pair", 1),
        ((1, 1, 1), 2, "pair", 1),
        ((1, 1, None), 2, "pair", 1),
        ((1, 2, 3), 2, "disagreement", None),
        ((1, 2), 2, "disagreement", None),
        ((1, 1, 2, 2), 2, "tie", None),
        ((1, 1, 2, 2, 3), 2, "tie", None),
        ((1, 1, 2, 2, 2), 2, "pair", 2),
        ((1, 1, 2, 3, 4), 2, "pair", 1),
        ((1, 1, 2), 3, "disagreement", None),
        ((99, 99, 1), 2, "agrees_with_student", None),
        ((99, 99, 1, 1), 2, "tie", None),
        ((99, 1, 1), 2, "pair", 1),
        ((1, None, None), 2, "too_few_votes", None),
        ((None, None, None), 2, "too_few_votes", None),
        ((), 2, "too_few_votes", None),
        ((1,), 1, "pair", 1),
        ((1, 2), 1, "tie", None),
    ],
)
def test_the_vote_rule(
    notes: tuple[int | None, ...], quorum: int, reason: str, chosen: int | None
) -> None:
    verdict = decide(STATE, votes(*notes), quorum)
    assert verdict.reason == reason
    assert verdict.chosen == (None if chosen is None else canonical_read(chosen))
    assert verdict.rejected == canonical_read(99)
    assert verdict.votes == tuple(votes(*notes))  # the audit trail is whole
    pair = pair_of(verdict)
    assert (pair is not None) == (reason == "pair")


def test_a_pair_says_how_many_agreed() -> None:
    pair = pair_of(decide(STATE, votes(1, 1, None, 2), 2))
    assert pair is not None
    assert (pair.chosen, pair.rejected) == (canonical_read(1), canonical_read(99))
    assert (pair.agreeing, pair.valid, pair.ref_version) == (2, 3, None)
    assert (pair.trace_id, pair.turn) == ("episode/0", 1)
    assert pair.opposing == 0
    divided = pair_of(decide(STATE, votes(1, 1, 99, 2), 2))
    assert divided is not None
    assert (divided.agreeing, divided.valid, divided.opposing) == (2, 4, 1)


def test_a_student_whose_action_cannot_be_done_is_still_rejected() -> None:
    state = a_state(student_action=ToolAction("reed_value", {"x": 1}))
    verdict = decide(state, votes(1, 1), 2)
    assert verdict.rejected == '{"arguments":{"x":1},"tool":"reed_value"}'
    assert verdict.reason == "pair"


def test_who_was_not_asked_has_no_opinion() -> None:
    assert decide(STATE, (), 2, "").reason == "not_worth_asking"


def test_a_teacher_has_one_vote() -> None:
    with pytest.raises(DataError, match="t0 has two"):
        decide(STATE, [*votes(1), *votes(1)], 2)


@pytest.mark.parametrize(
    ("notes", "quorum", "expected"),
    [
        ((), 2, ["t0", "t1"]),  # two cheap ones first
        ((1, 1), 2, []),  # they agree: the third is not paid
        ((1, 2), 2, ["t2"]),
        ((1, None), 2, ["t2"]),
        ((None, None), 2, []),  # one vote more makes no quorum
        ((1, 2, 3), 2, []),
        ((), 3, ["t0", "t1", "t2"]),
        ((), 1, ["t0"]),
        ((None,), 1, ["t1"]),
    ],
)
def test_who_is_asked_next(notes: tuple[int | None, ...], quorum: int, expected: list[str]) -> None:
    assert next_to_ask(["t0", "t1", "t2"], votes(*notes), quorum) == expected


@pytest.mark.parametrize(
    ("state", "gate", "expected"),
    [
        (a_state(), GateSpec(), "error_turn"),
        (a_state(error_kind=""), GateSpec(), ""),
        (a_state(error_kind="", confidence=0.3), GateSpec(), "low_confidence"),
        (a_state(error_kind="", confidence=0.5), GateSpec(), ""),
        (a_state(error_kind="", confidence=0.9), GateSpec(everywhere=True), "everywhere"),
        (a_state(), GateSpec(error_turns=False), ""),
        (a_state(confidence=0.1), GateSpec(error_turns=False), "low_confidence"),
    ],
)
def test_the_gate(state: ReplayState, gate: GateSpec, expected: str) -> None:
    assert worth_asking(state, gate) == expected


VOTES = [
    TeacherVote(
        "h",
        "a",
        "k1",
        "raw \u2603 \ud800",
        canonical_read(1),
        TeacherUsage(5, 6, 7),
        123,
        0.25,
        2,
        "",
    ),
    TeacherVote("h", "b", "k2", "", canonical_read(1), None, 0, 0.5, 1, ""),
    TeacherVote("h", "c", "k3", "", None, None, 10**15, 0.5, 3, "timeout"),
]
VERDICT = decide(a_state(), VOTES, 2, "error_turn")
PAIR = pair_of(VERDICT)


@pytest.mark.parametrize(
    "record",
    [
        a_state(),
        a_state(student_action=OptionAction("B"), options=("x", "y"), tools=(), confidence=0.25),
        a_state(student_action=TextAction("halve it"), tools=()),
        VOTES[1],
        VERDICT,
        PAIR,
    ],
)
def test_what_is_written_is_read_back_equal(record: Record) -> None:
    assert from_row(json.loads(json.dumps(to_row(record)))) == record


def test_rows_say_what_they_are() -> None:
    assert PAIR is not None
    assert to_row(PAIR) == {
        "schema": 1,
        "record": "pair",
        "state_hash": state_hash(a_state()),
        "trace_id": "episode/0",
        "turn": 1,
        "chosen": canonical_read(1),
        "rejected": canonical_read(99),
        "agreeing": 2,
        "valid": 2,
        "ref_version": None,
        "opposing": 0,
    }
    assert to_row(a_state())["state_hash"] == state_hash(a_state())


def test_a_pair_of_an_older_run_is_read() -> None:
    assert PAIR is not None
    older = {key: value for key, value in to_row(PAIR).items() if key != "opposing"}
    assert from_row(older) == PAIR


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"schema": 2, "record": "pair"},
        {"schema": 1, "record": "opinion"},
        {"schema": 1, "record": "pair", "state_hash": "x"},
    ],
)
def test_other_rows_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="a row of the teacher replay, schema 1, was expected"):
        from_row(row)
