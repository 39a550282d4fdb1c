"""Votes: the tables by hand, and that neither order nor abstentions change what is counted."""

from hypothesis import given
from hypothesis import strategies as st
from replay_setup import STATE, canonical_read, votes

from cartridge_forge.plugins.chat.messages import TeacherVote
from cartridge_forge.plugins.replay.voting import decide, next_to_ask

NOTES = st.lists(st.sampled_from([1, 2, 3, 99, None]), max_size=7)


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
