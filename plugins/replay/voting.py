"""Decide which teachers to ask, and derive the panel verdict from their votes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cartridge_forge.plugins.chat.messages import (
    PanelVerdict,
    PreferenceActions,
    ReplayState,
    TeacherVote,
    VerdictReason,
)
from cartridge_forge.plugins.replay.actions import canonical
from cartridge_forge.plugins.replay.prompts import state_hash
from cartridge_forge.plugins.replay.spec import GateSpec
from cartridge_forge.protocols.errors import DataError


def worth_asking(state: ReplayState, gate: GateSpec) -> str:
    """Return why teachers are asked about the state; "" if they are not."""
    if gate.error_turns and state.error_kind:
        return "error_turn"
    if state.confidence is not None and state.confidence < gate.confidence_below:
        return "low_confidence"
    return "everywhere" if gate.everywhere else ""


def next_to_ask(
    cheapest_first: Sequence[str], votes: Sequence[TeacherVote], quorum: int
) -> list[str]:
    """Return the teachers to ask now, given the votes so far; none once more votes cannot help. The
    number is what the quorum still lacks if all of them agree: with a quorum of 2, two cheap ones
    first, the third only when those disagree or abstain."""
    voted = {vote.teacher for vote in votes}
    remaining = [name for name in cheapest_first if name not in voted]
    most = max((n for _, n in count(votes)), default=0)
    lacking = quorum - most
    return remaining[:lacking] if 0 < lacking <= len(remaining) else []


def count(votes: Sequence[TeacherVote]) -> tuple[tuple[str, int], ...]:
    """Return (canonical action, valid votes), most votes first, then by the action's text. Raises
    DataError for a teacher with two votes."""
    names = [vote.teacher for vote in votes]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"a teacher has one vote in a state: {twice[0]} has two; drop one of them")
    tally = Counter(vote.canonical for vote in votes if vote.canonical is not None)
    return tuple(sorted(tally.items(), key=lambda item: (-item[1], item[0])))


def decide(
    state: ReplayState, votes: Sequence[TeacherVote], quorum: int, asked_because: str = "everywhere"
) -> PanelVerdict:
    """Return the verdict on a state: a pair where a quorum agrees on an action that the student did
    not take."""
    counts = count(votes)
    student = canonical(state.student_action, state)
    reason = _reason(counts, student, quorum) if asked_because else "not_worth_asking"
    chosen = counts[0][0] if reason == "pair" else None
    return PanelVerdict(
        state_hash(state), state.trace_id, state.turn, reason, chosen, student, counts,
        tuple(votes), asked_because,
    )  # fmt: skip


def pair_of(verdict: PanelVerdict) -> PreferenceActions | None:
    """Return the preference of a verdict, or None."""
    if verdict.chosen is None:
        return None
    return PreferenceActions(
        verdict.state_hash, verdict.trace_id, verdict.turn, verdict.chosen, verdict.rejected,
        verdict.counts[0][1], sum(n for _, n in verdict.counts),
        opposing=dict(verdict.counts).get(verdict.rejected, 0),
    )  # fmt: skip


def _reason(counts: Sequence[tuple[str, int]], student: str, quorum: int) -> VerdictReason:
    if sum(n for _, n in counts) < quorum:
        return "too_few_votes"
    (top, most), *lower = counts
    if most < quorum:
        return "disagreement"
    if lower and lower[0][1] == most:
        return "tie"
    return "agrees_with_student" if top == student else "pair"
