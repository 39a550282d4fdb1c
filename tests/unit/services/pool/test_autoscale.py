"""Test the sizes of a pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cartridge_forge.forge_run.resuming import resumed_sizes
from cartridge_forge.plugins.cluster.autoscale import decide
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.spec.services import AutoscaleSpec
from cartridge_forge.services.pool.sizes import PoolSize, opening, restore


def spec_of(**changes: float) -> AutoscaleSpec:
    """2 requests a replica, in band from 1.6 to 2.4; 3 s up, 10 s down; 1 to 8 replicas."""
    given = {"min": 1, "max": 8, "target_ongoing": 2.0, "tolerance": 0.2}
    given |= {"up_delay_s": 3.0, "down_delay_s": 10.0}
    return AutoscaleSpec(**(given | changes))


def sizes(spec: AutoscaleSpec, loads: Sequence[int], replicas: int, every: float = 1.0) -> list:
    """The size after each second's look at the load; each is given to the pool at once."""
    state, told = (), []
    for i, load in enumerate(loads):
        state, replicas = decide(state, i * every, load, replicas, spec)
        told.append(replicas)
    return told


# -- by hand ----------------------------------------------------------------------------------


def test_it_grows_once_the_load_was_high_for_the_delay() -> None:
    # 8 requests want 4 replicas; high since second 2, so 3 s later is second 5.
    assert sizes(spec_of(), [2, 2, 8, 8, 8, 8, 8], 1) == [1, 1, 1, 1, 1, 4, 4]


def test_a_ramp_is_followed_the_delay_behind() -> None:
    # On a ramp up the load of 3 s ago is the least of the last 3 s: 2 at second 3, in the band of
    # 1 replica, then 4, 6, 8, 10. The 12 at second 8 is just in the band of 5; 14 is not.
    ramp = [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert sizes(spec_of(), ramp, 1) == [1, 1, 1, 1, 2, 3, 4, 5, 5, 7]


def test_a_spike_shorter_than_the_delay_starts_nothing() -> None:
    assert sizes(spec_of(), [2, 2, 16, 16, 16, 2, 2, 2, 2], 1) == [1] * 9


def test_it_shrinks_once_the_load_was_low_for_the_delay_to_the_most_that_was_wanted() -> None:
    # Low from second 1 on: 3 requests (2 replicas) among ones; 10 s later is second 11. The 3 of
    # second 4 holds until second 5, is looked back at until second 15, and 1 is left after it.
    loads = [8, 1, 1, 1, 3, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert sizes(spec_of(), loads, 4) == [4] * 11 + [2] * 4 + [1]


def test_a_dip_shorter_than_the_delay_stops_nothing() -> None:
    assert sizes(spec_of(), [8, *[0] * 10, 8, *[0] * 10, 8], 4) == [4] * 23


def test_a_square_wave_faster_than_both_delays_changes_nothing() -> None:
    wave = ([16] * 2 + [0] * 2) * 10
    assert sizes(spec_of(), wave, 4) == [4] * 40


def test_a_square_wave_faster_than_the_way_down_stays_up() -> None:
    # 4 s high is longer than 3 s, so it grows once; 4 s low is not 10 s, so it stays.
    wave = ([16] * 4 + [0] * 4) * 5
    assert sizes(spec_of(), wave, 2) == [2] * 3 + [8] * 37


def test_no_load_leads_to_the_least_and_any_load_to_the_most_at_most() -> None:
    assert sizes(spec_of(min=2), [0] * 12, 5) == [5] * 10 + [2, 2]
    assert sizes(spec_of(max=6), [999] * 5, 1) == [1, 1, 1, 6, 6]


@pytest.mark.parametrize(("replicas", "wanted"), [(1, 2), (2, 2), (5, 5), (6, 5)])
def test_a_size_outside_the_limits_returns_to_them_at_once(replicas: int, wanted: int) -> None:
    # As after a new spec, or a scale by hand. The load is in the middle of each size's band.
    assert sizes(spec_of(min=2, max=5), [2 * replicas], replicas) == [wanted]


@pytest.mark.parametrize(
    ("load", "size"),
    # 10 replicas for 10 requests each: in the band from 80 to 120, both ends included.
    [(79, 8), (80, 10), (100, 10), (120, 10), (121, 13)],
)
def test_the_tolerance_band(load: int, size: int) -> None:
    spec = spec_of(max=99, target_ongoing=10.0, up_delay_s=0, down_delay_s=0)
    assert sizes(spec, [load], 10) == [size]


def test_without_delays_and_tolerance_it_is_the_quotient() -> None:
    spec = spec_of(up_delay_s=0, down_delay_s=0, tolerance=0, max=99)
    assert sizes(spec, [1, 2, 3, 9, 0, 40], 1) == [1, 1, 2, 5, 1, 20]


def test_what_was_seen_is_forgotten_after_the_longer_delay() -> None:
    state = ()
    for i in range(10_000):
        state, _ = decide(state, i * 0.5, i % 7, 4, spec_of())
    # 20 looks in 10 s, and the load that was in force when they began.
    assert len(state) == 21


def test_a_load_that_stays_is_kept_once() -> None:
    state, _ = decide((), 0.0, 4, 2, spec_of())
    same, _ = decide(state, 500.0, 4, 2, spec_of())
    assert same == state == ((0.0, 4),)


# -- whatever the load ------------------------------------------------------------------------

specs = st.builds(
    lambda least, more, target, tolerance, up, down: AutoscaleSpec(
        min=least, max=least + more, target_ongoing=target, tolerance=tolerance, up_delay_s=up,
        down_delay_s=down,
    ),
    st.integers(1, 4),
    st.integers(0, 12),
    st.floats(0.1, 9.0),
    st.floats(0, 0.9),
    st.floats(0, 20),
    st.floats(0, 20),
)  # fmt: skip
traces = st.lists(st.tuples(st.floats(0.01, 8), st.integers(0, 60)), min_size=1, max_size=30)


@given(spec=specs, load=st.integers(0, 120), replicas=st.integers(1, 20))
def test_at_a_constant_load_it_changes_once_at_most(
    spec: AutoscaleSpec, load: int, replicas: int
) -> None:
    replicas = min(max(replicas, spec.min), spec.max)
    told = [replicas, *sizes(spec, [load] * 60, replicas)]
    assert sum(a != b for a, b in pairwise(told)) <= 1
    # Where it ends: in the band, or at the quotient or the limit next to it.
    low = told[-1] * spec.target_ongoing * (1 - spec.tolerance)
    high = told[-1] * spec.target_ongoing * (1 + spec.tolerance)
    quotient = math.ceil(load / spec.target_ongoing)
    assert low <= load <= high or told[-1] == min(max(quotient, spec.min), spec.max)


@given(spec=specs, load=st.integers(0, 120), replicas=st.integers(1, 20), before=traces)
def test_at_a_constant_load_it_never_goes_there_and_back(
    spec: AutoscaleSpec, load: int, replicas: int, before: list[tuple[float, int]]
) -> None:
    """Whatever came before, which the delays still look back at: it only grows, or only shrinks,
    and what it has become when the past is out of sight it stays."""
    state, now = (), 0.0
    for wait, past in before:
        now += wait
        state, replicas = decide(state, now, past, replicas, spec)
    told = [replicas]
    for _ in range(60):
        state, replicas = decide(state, now, load, replicas, spec)
        told.append(replicas)
        now += 1.0
    assert told in (sorted(told), sorted(told, reverse=True))
    assert len(set(told[22:])) == 1  # the longest delay that is drawn is 20 s


@given(spec=specs, trace=traces, replicas=st.integers(1, 20))
def test_every_change_has_its_reason_in_the_trace(
    spec: AutoscaleSpec, trace: list[tuple[float, int]], replicas: int
) -> None:
    """Judged by an account of its own: what the load was at each of many instants."""
    replicas = min(max(replicas, spec.min), spec.max)
    state, now, looks = (), 0.0, []
    for wait, load in trace:
        now += wait
        looks = [*looks, (now, load)]
        state, wanted = decide(state, now, load, replicas, spec)
        assert spec.min <= wanted <= spec.max

        def within(delay: float, now: float = now, looks: list = looks) -> list[int]:
            starts = [t for t, _ in looks if t <= now - delay]
            assert starts, "nothing is known of so long ago"
            return [load for t, load in looks if t >= starts[-1]]

        if wanted > replicas:
            seen = within(spec.up_delay_s)
            assert min(seen) > replicas * spec.target_ongoing * (1 + spec.tolerance)
            assert wanted == min(spec.max, math.ceil(min(seen) / spec.target_ongoing))
        if wanted < replicas:
            seen = within(spec.down_delay_s)
            assert max(seen) < replicas * spec.target_ongoing * (1 - spec.tolerance)
            assert wanted == max(spec.min, math.ceil(max(seen) / spec.target_ongoing))
        replicas = wanted


AT = "2026-11-25T10:00:00.000Z"


def spec(**replicas: int) -> RunSpec:
    sets = [f"roles.{role}.replicas={n}" for role, n in replicas.items()]
    return load_spec("meshes/longhealth.yaml", sets=sets).spec


def scaled(role: str, replicas: int, by: str = "hand") -> dict[str, Any]:
    return {
        "time": AT,
        "event": "scaled",
        "role": role,
        "replicas": replicas,
        "before": 9,
        "by": by,
    }


def lines(*found: PoolSize) -> list[str]:
    return [str(one) for one in found]


BEGAN = spec(generator=2, doc_teacher=1)


def test_the_last_size_set_by_command_or_load_is_kept() -> None:
    assert resumed_sizes(BEGAN, BEGAN, [{"event": "run_started"}]) == ()
    events = [scaled("generator", 3), scaled("doc_teacher", 2, "load"), scaled("generator", 4)]
    assert lines(*resumed_sizes(BEGAN, BEGAN, events)) == [
        f"generator: 4 replicas, as scaled at {AT}",
        f"doc_teacher: 2 replicas, as its load asked for at {AT}",
    ]
    back = [*events, scaled("generator", 2), scaled("doc_teacher", 1), scaled("store", 3)]
    assert resumed_sizes(BEGAN, BEGAN, back) == ()


def test_a_size_given_now_wins_where_it_is_new() -> None:
    events = [scaled("generator", 4)]
    [size] = resumed_sizes(BEGAN, spec(generator=3, doc_teacher=1), events)
    assert size == PoolSize("generator", 3, 4, "spec")
    assert str(size) == "generator: 3 replicas, as given now, not 4"
    # The same command again, after another `forge scale`, gives nothing new.
    events += [scaled("generator", 3, "spec"), scaled("generator", 5)]
    [size] = resumed_sizes(BEGAN, spec(generator=3, doc_teacher=1), events)
    assert (size.replicas, size.by) == (5, "hand")


def test_a_size_that_a_person_gives_wins_in_any_case() -> None:
    events = [scaled("generator", 4)]
    [size] = resumed_sizes(BEGAN, BEGAN, events, given_roles=["generator"])
    assert size == PoolSize("generator", 2, 4, "spec")
    assert resumed_sizes(BEGAN, BEGAN, [*events, scaled("generator", 2, "spec")]) == ()


def test_pools_that_shrank_open_small_and_those_that_grew_are_scaled() -> None:
    async def scenario() -> None:
        sizes = (
            PoolSize("generator", 1, 2, "hand", AT),
            PoolSize("doc_teacher", 3, 1, "hand", AT),
            PoolSize("trainer", 1, 1, "spec"),
        )
        opened = opening(BEGAN, sizes)
        assert {name: role.replicas for name, role in opened.roles} == {
            "generator": 1, "doc_teacher": 1, "trainer": 1,
        }  # fmt: skip
        assert BEGAN.mesh.roles["generator"].replicas == 2
        asked: list[tuple[str, int]] = []
        notes: list[tuple[str, dict[str, Any]]] = []
        warnings: list[str] = []

        async def scale(role: str, replicas: int) -> None:
            asked.append((role, replicas))
            raise RunError("no rights")

        await restore(
            sizes, scale, lambda event, **facts: notes.append((event, facts)), warnings.append
        )
        assert asked == [("doc_teacher", 3)]
        assert notes == [("scaled", {"role": "trainer", "replicas": 1, "before": 1, "by": "spec"})]
        assert warnings == ["doc_teacher has 1 replicas, not 3: no rights"]

    asyncio.run(scenario())
