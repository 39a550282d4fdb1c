"""Votes: the tables by hand, and that neither order nor abstentions change what is counted."""

import pytest
from replay_setup import STATE, a_state, canonical_read, votes

from cartridge_forge.plugins.chat.messages import ReplayState, ToolAction
from cartridge_forge.plugins.replay.spec import GateSpec
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
