"""The loop over fake ports: the order of events, the staleness bound, and nothing left behind.

A fake's work takes a number of turns of the event loop, which stand for time: no test sleeps.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.step import check_fresh
from protocols.errors import RunError, StaleTokenError
from protocols.types import Packet, Sample, Scored, Stepped, TensorLayout
from services.loop import Done, OnPolicyLoop, Ports, Rollout

Event = tuple[Any, ...]
Turns = Callable[[str, int], int]


@dataclass
class House:
    """Generator, teacher and trainer in one, that write down what happens.

    `turns(phase, step)` is how long a phase takes. The generator refuses a version that was not
    published, as the real one does; the trainer refuses stale tokens by the real check.
    """

    staleness: int
    published: set[int]
    turns: Turns = lambda phase, step: 0
    publishes: bool = True  # False: versions are said to be published and never arrive
    fails: dict[tuple[str, int], Exception] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    async def work(self, phase: str, step: int) -> None:
        for _ in range(self.turns(phase, step)):
            await asyncio.sleep(0)
        if (phase, step) in self.fails:
            raise self.fails[phase, step]

    async def sample(self, step: int, version: int) -> Rollout:
        held = version if self.publishes else min(self.published)
        self.events.append(("rollout", step, version))
        assert held in self.published, f"version {held} is sampled before it is published"
        try:
            await self.work("rollout", step)
        except asyncio.CancelledError:
            self.events.append(("cancelled", step))
            raise
        self.events.append(("sampled", step))
        ids = tuple(range(step, step + 3))
        sample = Sample(f"{step}/0", "patient_01", (4, 5), ids, (-0.5,) * 3, (held,) * 3)
        return Rollout(step, (), (), (sample,), 0.0, 0.0)

    async def score(self, step: int, samples: Sequence[Sample]) -> Scored:
        self.events.append(("score", step))
        await self.work("score", step)
        return Scored(0.0, Packet(f"scores/{step}", TensorLayout(())), 3)

    async def train(self, samples: Sequence[Sample], packet: Packet, version: int) -> Stepped:
        step = int(packet.key.removeprefix("scores/"))
        assert samples[0].id == f"{step}/0", "the scores of another step"
        stale = check_fresh(samples, version, self.staleness)
        self.events.append(("train", step, version))
        await self.work("train", step)
        self.events.append(("trained", step))
        return Stepped(0.0, version=version + 1, tokens=3, stale_tokens=stale)

    async def publish(self, version: int) -> None:
        await self.work("publish", version)
        if self.publishes:
            self.published.add(version)
        self.events.append(("publish", version))

    @property
    def ports(self) -> Ports:
        return Ports(self.sample, self.score, self.train, self.publish)

    def loop(self, first: int, steps: int, pending: Sequence[Rollout] = ()) -> OnPolicyLoop:
        return OnPolicyLoop(
            self.ports,
            first_version=first,
            steps=steps,
            staleness=self.staleness,
            pending=pending,
        )


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    """The scenario's result; whatever it left running, or failed unseen, is a failure."""
    unseen: list[dict[str, Any]] = []

    async def watched() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unseen.append(context))
        result = await scenario
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"still running: {left}"
        return result

    result = asyncio.run(watched())
    assert not unseen
    return result


async def drive(house: House, first: int, steps: int) -> list[Done]:
    loop = house.loop(first, steps)
    try:
        return [await loop.step(step) for step in range(steps)]
    finally:
        await loop.close()


def sampled_versions(done: Sequence[Done]) -> list[tuple[int, int]]:
    """(step, version) of every token's version, checked to be one a step."""
    pairs = []
    for d in done:
        (version,) = {v for s in d.rollout.samples for v in s.versions}
        pairs.append((d.rollout.step, version))
    return pairs


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
    assert [d.stepped.version for d in done] == [first + 1, first + 2, first + 3]
    assert [d.stepped.stale_tokens for d in done] == [0, 0, 0]


def test_the_phases_are_announced_in_their_order() -> None:
    phases: list[str] = []
    house = House(0, {0})
    ports = Ports(house.sample, house.score, house.train, house.publish, phases.append)

    async def scenario() -> None:
        await OnPolicyLoop(ports, first_version=0, steps=1, staleness=0).step(0)

    run(scenario())
    assert phases == ["rollout", "score", "train", "publish"]


def test_seconds_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock reads 10 at the start, then 14, 15, 17.5 and 17.75 at the ends of the phases.

    Models computed 3.5 (rollout) + 0.75 (score) + 2 (train) of those 7.75 s.
    """
    house = House(0, {0})
    ticks = iter([10.0, 14.0, 15.0, 17.5, 17.75])
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))})

    async def sample(step: int, version: int) -> Rollout:
        made = await house.sample(step, version)
        return Rollout(step, (), (), made.samples, 3.9, 3.5)

    async def score(step: int, samples: Sequence[Sample]) -> Scored:
        return Scored(0.75, Packet(f"scores/{step}", TensorLayout(())), 3)

    async def train(samples: Sequence[Sample], packet: Packet, version: int) -> Stepped:
        return Stepped(2.0, version=version + 1)

    ports = Ports(sample, score, train, house.publish)
    monkeypatch.setattr("services.loop.time", clock)
    loop = OnPolicyLoop(ports, first_version=0, steps=1, staleness=0)
    times = run(loop.step(0)).times
    assert (times.rollout, times.score, times.train, times.publish) == (4.0, 1.0, 2.5, 0.25)
    assert times.step == 7.75
    assert times.orchestration == 7.75 - 3.5 - 0.75 - 2.0


def test_a_rollout_made_beside_training_counts_by_its_wait_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It computed 3.5 s, and the step waited 0.5 s for it: no negative orchestration."""
    house = House(1, {0, 1})
    made = run(house.sample(1, 0))
    pending = Rollout(1, (), (), made.samples, 3.9, 3.5)
    ticks = iter([20.0, 20.5, 21.0, 22.0, 22.25])
    clock = type("Clock", (), {"perf_counter": staticmethod(lambda: next(ticks))})
    monkeypatch.setattr("services.loop.time", clock)

    async def scenario() -> Done:
        return await house.loop(0, 2, [pending]).step(1)

    times = run(scenario()).times
    assert (times.rollout, times.step, times.orchestration) == (0.5, 2.25, 1.75)


# -- bounded staleness ------------------------------------------------------------------------

# At least one turn each: what takes no time at all leaves no room for anything beside it.
delays = st.lists(st.integers(1, 6), min_size=5, max_size=5)


def turns_of(drawn: list[int]) -> Turns:
    """A duration for every phase of every step, from a few drawn numbers."""
    phases = {"rollout": 1, "score": 2, "train": 3, "publish": 4}
    return lambda phase, step: drawn[(phases[phase] * (step + 1)) % len(drawn)]


@settings(max_examples=150, deadline=None)
@given(b=st.integers(0, 4), steps=st.integers(1, 7), first=st.integers(0, 3), drawn=delays)
def test_every_token_is_exactly_as_old_as_the_bound_says(
    b: int, steps: int, first: int, drawn: list[int]
) -> None:
    house = House(b, {first}, turns=turns_of(drawn))
    done = run(drive(house, first, steps))

    # Step s is sampled by version max(0, s - b), counted from the arm's first, whatever took long.
    assert sampled_versions(done) == [(s, first + max(0, s - b)) for s in range(steps)]
    for s, d in enumerate(done):
        age = first + s - d.rollout.samples[0].versions[0]
        assert age == min(s, b) <= b
        assert d.stepped.stale_tokens == (3 if age else 0)

    # No version is sampled before it was published; each step is sampled, trained and published
    # once, the last two in order.
    at = {event: i for i, event in enumerate(house.events)}
    assert len(at) == len(house.events) == 6 * steps
    for s in range(steps):
        version = first + max(0, s - b)
        if version > first:
            assert at["publish", version] < at["rollout", s, version]
        marks = [
            ("sampled", s), ("score", s), ("train", s, first + s), ("trained", s),
            ("publish", first + s + 1),
        ]  # fmt: skip
        places = [at[mark] for mark in marks]
        assert places == sorted(places), f"step {s}: {marks} came in another order"
        # Later rollouts, as many as the bound allows, begin before this step trains.
        for later in range(s + 1, min(s + b, steps - 1) + 1):
            assert at["rollout", later, first + max(0, later - b)] < at["train", s, first + s]
        # And none further: what is due after publish(s) begins after it.
        if s + b + 1 < steps:
            assert at["publish", first + s + 1] < at["rollout", s + b + 1, first + s + 1]


@pytest.mark.parametrize("b", [1, 3])
def test_rollouts_really_run_beside_training(b: int) -> None:
    """Training of step s ends only after rollouts s+1..s+b have ended: one after the other, that
    would wait for ever."""
    steps = 6
    house = House(b, {0})
    ended = [asyncio.Event() for _ in range(steps)]

    async def sample(step: int, version: int) -> Rollout:
        rollout = await house.sample(step, version)
        ended[step].set()
        return rollout

    async def train(samples: Sequence[Sample], packet: Packet, version: int) -> Stepped:
        for later in ended[version : version + b + 1]:
            await later.wait()
        return await house.train(samples, packet, version)

    async def scenario() -> None:
        ports = Ports(sample, house.score, train, house.publish)
        loop = OnPolicyLoop(ports, first_version=0, steps=steps, staleness=b)
        for step in range(steps):
            await asyncio.wait_for(loop.step(step), 5.0)

    run(scenario())
    for s in range(steps - b):
        assert house.events.index(("sampled", s + b)) < house.events.index(("trained", s))


# -- stopping, resuming, failing --------------------------------------------------------------


@settings(max_examples=100, deadline=None)
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

    async def scenario() -> list[Done]:
        before = House(b, {first}, turns=turns_of(drawn))
        loop = before.loop(first, steps)
        done = [await loop.step(step) for step in range(stop)]
        pending = await loop.settle()
        await loop.close()
        ahead = range(stop, min(stop + b, steps)) if stop else range(0)
        assert [r.step for r in pending] == list(ahead)

        # The new generator holds only the version that a resumed run publishes first.
        after = House(b, {first + stop}, turns=turns_of(drawn[::-1]))
        loop = after.loop(first, steps, pending)
        try:
            done += [await loop.step(step) for step in range(stop, steps)]
        finally:
            await loop.close()
        again = {event[1] for event in after.events if event[0] == "rollout"}
        assert not again & set(ahead), "a pending rollout was sampled a second time"
        return done

    resumed = run(scenario())
    assert sampled_versions(resumed) == sampled_versions(whole)
    assert [d.rollout.samples for d in resumed] == [d.rollout.samples for d in whole]
    assert [d.stepped for d in resumed] == [d.stepped for d in whole]


def test_settling_changes_nothing_for_the_run_that_goes_on() -> None:
    async def scenario() -> tuple[list[Done], House]:
        house = House(2, {0}, turns=lambda phase, step: 3)
        loop = house.loop(0, 5)
        done = []
        for step in range(5):
            done.append(await loop.step(step))
            settled = await loop.settle()
            assert [r.step for r in settled] == list(range(step + 1, min(step + 3, 5)))
            assert await loop.settle() == settled
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
        await loop.close()
        await loop.close()  # twice does no harm

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
        await loop.close()

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
def test_a_failing_port_ends_the_step_with_its_error(
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
        await loop.close()

    run(scenario())


def test_a_rollout_that_failed_ahead_and_is_never_asked_for_is_no_noise() -> None:
    house = House(1, {0}, fails={("rollout", 1): RunError("the generator died")})

    async def scenario() -> None:
        loop = house.loop(0, 5)
        await loop.step(0)
        await loop.close()

    run(scenario())


# -- a publish that does not arrive -----------------------------------------------------------


@pytest.mark.parametrize("b", [0, 1, 3])
def test_a_broken_publish_is_refused_not_trained(b: int) -> None:
    """Generators that go on sampling version 0 are within the bound for b steps, and not after."""
    house = House(b, {0}, publishes=False)

    async def scenario() -> None:
        with pytest.raises(StaleTokenError) as caught:
            await drive(house, 0, 9)
        assert str(caught.value) == (
            f"sample {b + 1}/0 was sampled by version 0, and version {b + 1} is being trained "
            f"with train.staleness {b}: a publish did not reach the generator that sampled it; "
            "nothing was trained on it"
        )

    run(scenario())
    assert [e[1] for e in house.events if e[0] == "trained"] == list(range(b + 1))
    assert ("publish", b + 2) not in house.events
