"""Routers: fairness, affinity that moves as little as can be, and the same choice everywhere."""

import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.protocols.spec.services import RouterName
from cartridge_forge.services.pool.pool import Router

indices = st.sets(st.integers(0, 40), min_size=1, max_size=8).map(sorted)
names = st.text(max_size=12)


@dataclass
class Load:
    """A replica as a router sees it."""

    slot: int
    ongoing: int


def idle(*at: int) -> list[Load]:
    return [Load(i, 0) for i in at]


def choose(router: Router, seats: Sequence[Load], session: str | None) -> int:
    return router.choose(seats, session).slot


# -- round robin ------------------------------------------------------------------------------


def test_round_robin_goes_by_index_whatever_the_order_of_the_seats() -> None:
    router = Router("round_robin")
    assert [choose(router, idle(5, 2, 9), None) for _ in range(5)] == [2, 5, 9, 2, 5]


def test_a_replica_that_leaves_or_returns_shifts_nobodys_turn() -> None:
    router = Router("round_robin")
    assert [choose(router, idle(0, 1, 2), None) for _ in range(2)] == [0, 1]
    assert choose(router, idle(0, 2), None) == 2
    assert [choose(router, idle(0, 1, 2), None) for _ in range(3)] == [0, 1, 2]


@given(at=indices, rounds=st.integers(1, 5), extra=st.integers(0, 7))
def test_round_robin_gives_each_its_share(at: list[int], rounds: int, extra: int) -> None:
    router = Router("round_robin")
    calls = rounds * len(at) + extra % len(at)
    counts = Counter(choose(router, idle(*at), "s") for _ in range(calls))
    assert set(counts) == set(at)
    assert max(counts.values()) - min(counts.values()) <= 1


# -- least loaded -----------------------------------------------------------------------------


def test_least_loaded_by_hand() -> None:
    router = Router("least_loaded")
    seats = [Load(0, 3), Load(1, 1), Load(2, 1), Load(3, 2)]
    assert [choose(router, seats, None) for _ in range(3)] == [1, 2, 1]
    assert choose(router, [Load(0, 0), *seats[1:]], None) == 0


@given(loads=st.lists(st.integers(0, 5), min_size=1, max_size=8))
def test_the_choice_has_the_fewest(loads: list[int]) -> None:
    seats = [Load(i, n) for i, n in enumerate(loads)]
    assert loads[choose(Router("least_loaded"), seats, None)] == min(loads)


@given(at=indices, calls=st.integers(1, 40))
def test_idle_replicas_share_and_so_do_busy_ones(at: list[int], calls: int) -> None:
    """One request after the other, each answered at once; and as many that are never answered."""
    router = Router("least_loaded")
    answered = Counter(choose(router, idle(*at), None) for _ in range(calls))
    open_ = dict.fromkeys(at, 0)
    for _ in range(calls):
        open_[choose(router, [Load(i, n) for i, n in open_.items()], None)] += 1
    for counts in (answered, open_):
        assert max(counts.values()) <= math.ceil(calls / len(at))
        assert sum(counts.values()) == calls


# -- sessions ---------------------------------------------------------------------------------


@given(at=indices, session=names, data=st.data())
def test_a_session_stays_whatever_the_order_and_the_load(
    at: list[int], session: str, data: st.DataObject
) -> None:
    chosen = choose(Router("session"), idle(*at), session)
    busy = [Load(i, data.draw(st.integers(0, 9))) for i in data.draw(st.permutations(at))]
    router = Router("session")
    choose(router, busy, None)
    assert choose(router, busy, session) == chosen


@given(at=indices, gone=st.integers(0, 7), sessions=st.lists(names, max_size=40))
def test_a_replica_that_goes_or_comes_moves_its_own_sessions_alone(
    at: list[int], gone: int, sessions: list[str]
) -> None:
    router = Router("session")
    leaver = at[gone % len(at)]
    rest = [i for i in at if i != leaver]
    for session in sessions:
        whole = choose(router, idle(*at), session)
        if rest and whole != leaver:
            assert choose(router, idle(*rest), session) == whole


def test_sessions_spread_evenly_and_so_do_those_of_a_replica_that_goes() -> None:
    """12,000 sessions over 6 replicas: 2,000 each, give or take 5 standard deviations of a fair
    die (41 each); the 2,000 of one that goes over 5 others: 400 each, likewise (18)."""
    router = Router("session")
    sessions = [f"patient_{i}" for i in range(12_000)]
    before = {s: choose(router, idle(*range(6)), s) for s in sessions}
    counts = Counter(before.values())
    assert len(counts) == 6
    assert all(abs(n - 2_000) <= 5 * math.sqrt(12_000 * 5 / 36) for n in counts.values())

    moved = Counter(
        choose(router, idle(0, 1, 2, 4, 5), s) for s, replica in before.items() if replica == 3
    )
    assert sorted(moved) == [0, 1, 2, 4, 5]
    share, spread = counts[3] / 5, math.sqrt(counts[3] * 4 / 25)
    assert all(abs(n - share) <= 5 * spread for n in moved.values())


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    router = Router("session")
    assert choose(router, [Load(0, 2), Load(1, 1), Load(2, 2)], None) == 1
    assert [choose(router, idle(0, 1, 2), None) for _ in range(3)] == [2, 0, 1]


def test_the_empty_session_is_a_session() -> None:
    router = Router("session")
    assert len({choose(router, idle(0, 1, 2), "") for _ in range(6)}) == 1


def test_another_process_chooses_alike() -> None:
    """With other seeds of `hash`, whose values differ between them."""
    code = (
        "from types import SimpleNamespace as Load\n"
        "from cartridge_forge.services.pool.pool import Router\n"
        "seats = [Load(slot=i, ongoing=0) for i in range(8)]\n"
        "router = Router('session')\n"
        "print(hash('patient_1'))\n"
        "print(*(router.choose(seats, f'patient_{i}').slot for i in range(64)))\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True, timeout=60,
        ).stdout.split()
        for seed in ("1", "2")
    ]  # fmt: skip
    assert runs[0][0] != runs[1][0]
    router = Router("session")
    here = [str(choose(router, idle(*range(8)), f"patient_{i}")) for i in range(64)]
    assert runs[0][1:] == runs[1][1:] == here
    assert set(here) == set("01234567")


# -- all --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["round_robin", "least_loaded", "session"])
@given(
    calls=st.lists(st.tuples(indices, st.lists(st.integers(0, 4)), st.none() | names), max_size=30)
)
def test_the_choice_is_there_and_history_alone_decides_it(
    name: RouterName, calls: list[tuple[list[int], list[int], str | None]]
) -> None:
    """Seats come, go and fill at random; two routers of one history agree on every choice."""
    router, twin = Router(name), Router(name)
    for at, loads, session in calls:
        seats = [Load(i, n) for i, n in zip(at, loads + [0] * len(at), strict=False)]
        chosen = choose(router, seats, session)
        assert chosen in at
        assert choose(twin, list(reversed(seats)), session) == chosen
