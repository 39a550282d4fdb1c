"""A replica's life: by hand, and over random orders of what may happen to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.spec.services import HealthSpec
from protocols.records.status import ReplicaState
from services.pool.health import Life, drained, judge, lost, refitted, silent

DEAD, DRAINING = ReplicaState.DEAD, ReplicaState.DRAINING
HEALTHY, SUSPECT = ReplicaState.HEALTHY, ReplicaState.SUSPECT
SPEC = HealthSpec(heartbeat_s=0.5, suspect_after_s=2.0, dead_after_s=15.0)
STARTING, GONE = Life(), Life(DEAD, over=True)


@pytest.mark.parametrize(
    ("seconds", "state"),
    [
        (0.0, HEALTHY), (1.999, HEALTHY), (2.0, SUSPECT), (14.999, SUSPECT), (15.0, DEAD),
        (1e9, DEAD),
    ],
)  # fmt: skip
def test_silence_is_judged(seconds: float, state: ReplicaState) -> None:
    assert judge(seconds, SPEC) is state


def test_a_starting_process_works_only_after_its_refit() -> None:
    assert STARTING.state is DEAD
    for early in (0.0, 3.0, 100.0):  # neither its heartbeats nor its silence while it starts
        assert silent(STARTING, early, SPEC) == STARTING
    assert refitted(STARTING) == Life(HEALTHY)


def test_a_doubted_replica_returns_on_a_heartbeat() -> None:
    doubted = silent(Life(HEALTHY), 2.0, SPEC)
    assert doubted == Life(SUSPECT)
    assert refitted(doubted) == doubted, "a refit proves nothing about its silence"
    assert silent(doubted, 0.0, SPEC) == Life(HEALTHY)


def test_what_was_given_up_stays_dead() -> None:
    """A process that was stopped, replaced, and then goes on: its late heartbeat counts nothing."""
    given_up = silent(Life(SUSPECT), 15.0, SPEC)
    assert given_up == GONE
    assert refitted(GONE) == silent(GONE, 0.0, SPEC) == drained(GONE) == lost(GONE) == GONE


@pytest.mark.parametrize("before", [STARTING, Life(HEALTHY), Life(SUSPECT), Life(DRAINING)])
def test_draining_ends_and_never_returns(before: Life) -> None:
    draining = drained(before)
    assert draining == Life(DRAINING)
    assert refitted(draining) == silent(draining, 0.0, SPEC) == silent(draining, 9.0, SPEC)
    assert silent(draining, 9.0, SPEC) == draining
    assert silent(draining, 15.0, SPEC) == GONE  # what it had must be given to another


moves = st.one_of(
    st.just("refit"), st.just("drain"), st.just("lost"), st.floats(0, 30, allow_nan=False)
)
# Every change that the drawing in protocols/records/status.py allows, with what brings it about.
LEGAL = {
    (STARTING, Life(HEALTHY)): "refit",
    (Life(HEALTHY), Life(SUSPECT)): "silence",
    (Life(SUSPECT), Life(HEALTHY)): "silence",
    (STARTING, Life(DRAINING)): "drain",
    (Life(HEALTHY), Life(DRAINING)): "drain",
    (Life(SUSPECT), Life(DRAINING)): "drain",
    (STARTING, GONE): "lost",
    (Life(HEALTHY), GONE): "silence or lost",
    (Life(SUSPECT), GONE): "silence or lost",
    (Life(DRAINING), GONE): "silence or lost",
}


@given(st.lists(moves, max_size=30))
def test_no_order_of_events_leaves_the_drawing(happened: list[str | float]) -> None:
    life, refits, drains, ended = Life(), 0, False, False
    for move in happened:
        before = life
        if isinstance(move, float):
            life, cause = silent(life, move, SPEC), "silence"
        else:
            cause = move
            life = {"refit": refitted, "drain": drained, "lost": lost}[move](life)
        refits += cause == "refit"
        drains |= cause == "drain"
        if life != before:
            assert cause in LEGAL[before, life]
        ended |= life == GONE
        # Requests go only where a refit came before, no drain and no end did, and it was just
        # heard of.
        if life.takes_requests:
            assert refits
            assert not drains
            assert not ended
            assert not isinstance(move, float) or move < 2.0
        if cause == "lost":
            assert life == GONE
