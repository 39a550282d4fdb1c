"""On which host a process starts."""

from hypothesis import given
from hypothesis import strategies as st

from services.pool.placement import Slot, choose, crowded, lack

SPOTS = st.lists(
    st.builds(
        Slot,
        role=st.sampled_from(["", "generator", "trainer"]),
        capacity=st.integers(0, 2),
        busy=st.integers(0, 3),
        well=st.booleans(),
    ),
    max_size=6,
)
ROLES = st.sampled_from(["", "generator", "trainer", "store"])


def test_the_host_with_the_fewest_and_the_first_of_equals() -> None:
    assert choose([Slot(busy=2), Slot(busy=1), Slot(busy=1)], "generator") == 1


def test_a_role_s_own_workers_come_before_those_of_any() -> None:
    spots = [Slot(), Slot("generator", capacity=1), Slot("trainer")]
    assert choose(spots, "generator") == 1
    assert choose(spots, "trainer") == 2
    assert choose(spots, "store") == 0


def test_a_full_or_doubted_one_is_passed_over() -> None:
    spots = [Slot("generator", 1, busy=1), Slot("generator", 1, well=False)]
    assert choose(spots, "generator") is None
    assert choose([*spots, Slot(busy=9)], "generator") == 2
    assert lack(spots, "generator") == "2 workers take generator: 1 full, 1 silent"
    assert lack(spots, "store") == "no worker takes store"


def test_a_spare_takes_nobody_s_place() -> None:
    assert choose([Slot("generator"), Slot("", capacity=2)], "") is None
    assert choose([Slot("generator"), Slot("", busy=7)], "") == 1


def test_away_from_a_host() -> None:
    assert choose([Slot(busy=0), Slot(busy=5)], "generator", without=0) == 1


@given(SPOTS, ROLES)
def test_what_is_chosen_may_be(spots: list[Slot], role: str) -> None:
    at = choose(spots, role)
    may = [s.well and s.fits(role) and (not s.capacity or s.busy < s.capacity) for s in spots]
    assert (at is None) == (not any(may))
    if at is not None:
        assert may[at]
        own = [s for s, ok in zip(spots, may, strict=True) if ok and s.role == role]
        assert spots[at].busy == min(s.busy for s in own or [spots[at]])


def test_two_more_than_another_of_its_role_is_crowded() -> None:
    spots = [Slot(), Slot(), Slot("generator"), Slot("generator")]
    assert crowded(spots, [2, 0, 1, 1]) == 0
    assert crowded(spots, [2, 1, 3, 1]) == 2
    assert crowded(spots, [1, 0, 1, 0]) is None
    assert crowded(spots, [3, 3, 0, 0]) is None, "those of another role are no place for them"


def test_nobody_is_moved_to_a_full_or_doubted_host() -> None:
    assert crowded([Slot(), Slot(well=False)], [4, 0]) is None
    assert crowded([Slot("", 4, 4), Slot("", 1, 1)], [4, 0]) is None
