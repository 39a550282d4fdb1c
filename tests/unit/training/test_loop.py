"""The loop over fake ports: the order of events, what runs ahead, and nothing left behind."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_setup import House, delays, drive, run, sampled_versions, turns_of

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.protocols.step import TrainBatch, TrainStepOutput
from cartridge_forge.training.records import Rollout, ScoringCost, StepRecord, WorkTime

# -- strict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 7])
def test_a_strict_step_is_rollout_score_train_publish(first: int) -> None:
    house = House(0, {first}, turns=lambda phase, step: 2)
    done = run(drive(house, first, 3))
    assert house.events == [
        event
        for s in range(3)
        for event in [
            ("rollout", s, first + s),
            ("sampled", s),
            ("score", s),
            ("train", s, first + s),
            ("trained", s),
            ("publish", first + s + 1),
        ]
    ]
    assert sampled_versions(done) == [(s, first + s) for s in range(3)]
    assert [d.output.version for d in done] == [first + 1, first + 2, first + 3]
    assert [d.output.stale_tokens for d in done] == [0, 0, 0]


@pytest.mark.parametrize(("waiting", "prepared"), [(False, [1, 2]), (True, [])])
def test_the_next_rollout_is_prepared_unless_a_validation_runs(
    waiting: bool, prepared: list[int]
) -> None:
    house = House(0, {0})

    async def scenario() -> list[int]:
        loop = house.loop(0, 3)
        ports: Any = loop.validation
        ports.row = object() if waiting else None
        for step in range(3):
            await loop.step(step)
            await asyncio.sleep(0.01)  # it is prepared a millisecond after training began
        return list(ports.prepared)

    assert run(scenario()) == prepared


def test_the_phases_are_announced_in_their_order() -> None:
    phases: list[str] = []
    house = House(0, {0})

    async def scenario() -> None:
        await house.loop(0, 1, watch=phases.append).step(0)

    run(scenario())
    assert phases == ["rollout", "score", "train", "publish"]


def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock reads 10 at the start, then 14, 15, 17.5 and 17.75 at the ends of the phases.

    Models computed in 6.25 of those 7.75 s, and an environment alone worked in 0.5.
    """
    ticks = iter([10.0, 14.0, 15.0, 17.5, 17.75])
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))})

    class Timed(House):
        async def score(self, rollout: Rollout) -> tuple[TrainBatch, ScoringCost]:
            return TrainBatch(), ScoringCost()

        async def train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
            return TrainStepOutput(2.0, version=version + 1)

        def work_time(self, begin: float, end: float) -> WorkTime:
            assert (begin, end) == (10.0, 17.75)
            return WorkTime(6.25, 0.5)

    monkeypatch.setattr("cartridge_forge.training.loop.time", clock)

    async def scenario() -> StepRecord:
        return await Timed(0, {0}).loop(0, 1).step(0)

    times = run(scenario()).times
    assert (times.rollout, times.score, times.train, times.publish) == (4.0, 1.0, 2.5, 0.25)
    assert times.step == 7.75
    assert (times.environment, times.orchestration) == (0.5, 1.0)


# -- stopping, resuming, failing --------------------------------------------------------------


@given(
    b=st.integers(0, 3),
    steps=st.integers(1, 6),
    stop=st.integers(0, 6),
    first=st.integers(0, 2),
    drawn=delays,
)
def test_resuming_with_what_was_pending_is_never_having_stopped(
    b: int, steps: int, stop: int, first: int, drawn: list[int]
) -> None:
    stop = min(stop, steps)
    whole = run(drive(House(b, {first}, turns=turns_of(drawn)), first, steps))

    async def scenario() -> list[StepRecord]:
        before = House(b, {first}, turns=turns_of(drawn))
        loop = before.loop(first, steps)
        done = [await loop.step(step) for step in range(stop)]
        pending = await loop.rollouts.settle()
        await loop.rollouts.close()
        ahead = range(stop, min(stop + b, steps)) if stop else range(0)
        assert [r.step for r in pending] == list(ahead)

        # The new generator holds only the version that a resumed run publishes first.
        after = House(b, {first + stop}, turns=turns_of(drawn[::-1]))
        loop = after.loop(first, steps, pending)
        try:
            done += [await loop.step(step) for step in range(stop, steps)]
        finally:
            await loop.rollouts.close()
        again = {event[1] for event in after.events if event[0] == "rollout"}
        assert not again & set(ahead), "a pending rollout was sampled a second time"
        return done

    resumed = run(scenario())
    assert sampled_versions(resumed) == sampled_versions(whole)
    assert [d.rollout.samples for d in resumed] == [d.rollout.samples for d in whole]
    assert [d.output for d in resumed] == [d.output for d in whole]


def test_settling_changes_nothing_for_the_run_that_goes_on() -> None:
    async def scenario() -> tuple[list[StepRecord], House]:
        house = House(2, {0}, turns=lambda phase, step: 3)
        loop = house.loop(0, 5)
        done = []
        for step in range(5):
            done.append(await loop.step(step))
            settled = await loop.rollouts.settle()
            assert [r.step for r in settled] == list(range(step + 1, min(step + 3, 5)))
            assert await loop.rollouts.settle() == settled
        return done, house

    done, house = run(scenario())
    assert sampled_versions(done) == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]
    assert sum(event[0] == "rollout" for event in house.events) == 5


def test_close_cancels_what_runs_ahead() -> None:
    never = 10**9
    house = House(2, {0}, turns=lambda phase, step: never if step > 0 and phase == "rollout" else 0)

    async def scenario() -> None:
        loop = house.loop(0, 9)
        await loop.step(0)
        await loop.rollouts.close()
        await loop.rollouts.close()  # twice does no harm

    run(scenario())
    assert sorted(e for e in house.events if e[0] == "cancelled") == [
        ("cancelled", 1),
        ("cancelled", 2),
    ]


def test_a_step_that_is_cancelled_takes_its_rollout_with_it() -> None:
    house = House(1, {0}, turns=lambda phase, step: 10**9)

    async def scenario() -> None:
        loop = house.loop(0, 9)
        task = asyncio.create_task(loop.step(0))
        for _ in range(3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
        await loop.rollouts.close()

    run(scenario())
    assert house.events == [
        ("rollout", 0, 0),
        ("rollout", 1, 0),
        ("cancelled", 0),
        ("cancelled", 1),
    ]


@pytest.mark.parametrize("b", [0, 2])
@pytest.mark.parametrize(
    ("phase", "at", "events"),
    [
        ("rollout", 1, ["rollout"]),
        ("score", 1, ["rollout", "sampled", "score"]),
        ("train", 1, ["rollout", "sampled", "score", "train"]),
        ("publish", 2, ["rollout", "sampled", "score", "train", "trained"]),
    ],
)
def test_a_failing_phase_ends_the_step_with_its_error(
    phase: str, at: int, events: list[str], b: int
) -> None:
    """In step 1 (publish of version 2 belongs to it). Nothing after it happens, nothing runs on."""
    broken = RunError(f"{phase} failed")
    house = House(b, {0}, turns=lambda phase, step: 2, fails={(phase, at): broken})

    async def scenario() -> None:
        with pytest.raises(RunError) as caught:
            await drive(house, 0, 5)
        assert caught.value is broken

    run(scenario())
    first = [e for e in house.events if e[0] != "publish" and e[1] == 0]
    assert [e[0] for e in first] == ["rollout", "sampled", "score", "train", "trained"]
    assert [e[0] for e in house.events if e[0] != "publish" and e[1] == 1] == events
    assert [e for e in house.events if e[0] == "publish"] == [("publish", 1)]
    assert 1 + 1 not in house.published


def test_a_rollout_that_fails_ahead_is_raised_in_its_own_step() -> None:
    broken = RunError("the generator died")
    house = House(2, {0}, fails={("rollout", 2): broken})

    async def scenario() -> None:
        loop = house.loop(0, 5)
        for step in (0, 1):
            await loop.step(step)
        assert ("rollout", 2, 0) in house.events
        with pytest.raises(RunError) as caught:
            await loop.step(2)
        assert caught.value is broken
        await loop.rollouts.close()

    run(scenario())


def test_a_rollout_that_failed_ahead_and_is_never_asked_for_is_no_noise() -> None:
    house = House(1, {0}, fails={("rollout", 1): RunError("the generator died")})

    async def scenario() -> None:
        loop = house.loop(0, 5)
        await loop.step(0)
        await loop.rollouts.close()

    run(scenario())
