"""Records as rows: written, through JSON, and read back equal; other rows are refused."""

import json
from typing import Any

import pytest
from replay_setup import a_state, canonical_read

from cartridge_forge.plugins.chat.messages import (
    OptionAction,
    TeacherUsage,
    TeacherVote,
    TextAction,
)
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.vote_records import Record, from_row, to_row
from cartridge_forge.plugins.replay.voting import decide, pair_of
from cartridge_forge.protocols.errors import DataError

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
