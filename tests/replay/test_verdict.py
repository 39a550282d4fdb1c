"""Votes: the tables by hand, and that neither order nor abstentions change what is counted."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_house import a_state, canonical_read

from protocols.errors import DataError
from protocols.spec.teacher_replay import GateSpec
from protocols.teacher_replay import ReplayState, TeacherVote, ToolAction
from teachers.voting import decide, next_to_ask, pair_of, worth_asking

STATE = a_state()  # the student reads note 99


def votes(*notes: int | None) -> list[TeacherVote]:
    """Teachers t0, t1, ... read these notes; None abstains."""
    return [
        TeacherVote(
            "h", f"t{i}", "k", "", None if n is None else canonical_read(n), None, 0, 0.0, 1, ""
        )
        for i, n in enumerate(notes)
    ]


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


NOTES = st.lists(st.sampled_from([1, 2, 3, 99, None]), max_size=7)


@settings(max_examples=120, deadline=None)
@given(notes=NOTES, quorum=st.integers(1, 4), data=st.data())
def test_the_verdict_by_its_definition(
    notes: list[int | None], quorum: int, data: st.DataObject
) -> None:
    cast = votes(*notes)
    verdict = decide(STATE, cast, quorum)
    shuffled = decide(STATE, data.draw(st.permutations(cast)), quorum)
    assert (shuffled.reason, shuffled.chosen) == (verdict.reason, verdict.chosen)
    tally = {n: notes.count(n) for n in notes if n is not None}
    winners = [
        n
        for n, count in tally.items()
        if count >= quorum and all(count > other for m, other in tally.items() if m != n)
    ]
    if winners and winners != [99]:
        assert (verdict.reason, verdict.chosen) == ("pair", canonical_read(winners[0]))
    else:
        assert verdict.chosen is None
        assert (verdict.reason == "agrees_with_student") == (winners == [99])


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


@settings(max_examples=80, deadline=None)
@given(notes=st.lists(st.sampled_from([1, 2, None]), min_size=1, max_size=6), data=st.data())
def test_asking_in_stages_ends_and_misses_no_quorum(
    notes: list[int | None], data: st.DataObject
) -> None:
    """Asking stops only where a quorum is there, or no order of further votes could make one."""
    quorum = data.draw(st.integers(1, len(notes)))
    everyone = votes(*notes)
    names = [vote.teacher for vote in everyone]
    cast: list[TeacherVote] = []
    while names_now := next_to_ask(names, cast, quorum):
        cast += [vote for vote in everyone if vote.teacher in names_now]
    tally = [sum(v.canonical == canonical_read(n) for v in cast) for n in (1, 2)]
    assert max(tally) >= quorum or max(tally) + len(everyone) - len(cast) < quorum


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
