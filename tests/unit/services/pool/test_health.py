"""A replica's life: by hand, and over random orders of what may happen to it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.records.status import ReplicaState
from cartridge_forge.protocols.spec.services import HealthSpec
from cartridge_forge.services.pool.health import HealthState, drained, lost, refitted, silent

DEAD, DRAINING = ReplicaState.DEAD, ReplicaState.DRAINING
HEALTHY, SUSPECT = ReplicaState.HEALTHY, ReplicaState.SUSPECT
SPEC = HealthSpec(heartbeat_s=0.5, suspect_after_s=2.0, dead_after_s=15.0)
STARTING, GONE = HealthState(), HealthState(DEAD, over=True)


@pytest.mark.parametrize(
    ("seconds", "state"),
    [
        (0.0, HEALTHY), (1.999, HEALTHY), (2.0, SUSPECT), (14.999, SUSPECT), (15.0, DEAD),
        (1e9, DEAD),
    ],
)  # fmt: skip
def test_silence_is_judged(seconds: float, state: ReplicaState) -> None:
    assert silent(HealthState(HEALTHY), seconds, SPEC).state is state


def test_a_starting_process_works_only_after_its_refit() -> None:
    assert STARTING.state is DEAD
    for early in (0.0, 3.0, 100.0):  # neither its heartbeats nor its silence while it starts
        assert silent(STARTING, early, SPEC) == STARTING
    assert refitted(STARTING) == HealthState(HEALTHY)


def test_a_doubted_replica_returns_on_a_heartbeat() -> None:
    doubted = silent(HealthState(HEALTHY), 2.0, SPEC)
    assert doubted == HealthState(SUSPECT)
    assert refitted(doubted) == doubted, "a refit proves nothing about its silence"
    assert silent(doubted, 0.0, SPEC) == HealthState(HEALTHY)


def test_what_was_given_up_stays_dead() -> None:
    """A process that was stopped, replaced, and then goes on: its late heartbeat counts nothing."""
    given_up = silent(HealthState(SUSPECT), 15.0, SPEC)
    assert given_up == GONE
    assert refitted(GONE) == silent(GONE, 0.0, SPEC) == drained(GONE) == lost(GONE) == GONE


@pytest.mark.parametrize(
    "before", [STARTING, HealthState(HEALTHY), HealthState(SUSPECT), HealthState(DRAINING)]
)
def test_draining_ends_and_never_returns(before: HealthState) -> None:
    draining = drained(before)
    assert draining == HealthState(DRAINING)
    assert refitted(draining) == silent(draining, 0.0, SPEC) == silent(draining, 9.0, SPEC)
    assert silent(draining, 9.0, SPEC) == draining
    assert silent(draining, 15.0, SPEC) == GONE  # what it had must be given to another


moves = st.one_of(
    st.just("refit"), st.just("drain"), st.just("lost"), st.floats(0, 30, allow_nan=False)
)
# Every change that the drawing in protocols/records/status.py allows, with what brings it about.
LEGAL = {
    (STARTING, HealthState(HEALTHY)): "refit",
    (HealthState(HEALTHY), HealthState(SUSPECT)): "silence",
    (HealthState(SUSPECT), HealthState(HEALTHY)): "silence",
    (STARTING, HealthState(DRAINING)): "drain",
    (HealthState(HEALTHY), HealthState(DRAINING)): "drain",
    (HealthState(SUSPECT), HealthState(DRAINING)): "drain",
    (STARTING, GONE): "lost",
    (HealthState(HEALTHY), GONE): "silence or lost",
    (HealthState(SUSPECT), GONE): "silence or lost",
    (HealthState(DRAINING), GONE): "silence or lost",
}


@given(st.lists(moves, max_size=30))
def test_no_order_of_events_leaves_the_drawing(happened: list[str | float]) -> None:
    life, refits, drains, ended = HealthState(), 0, False, False
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
