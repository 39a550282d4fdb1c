"""Bounded staleness: no token older than the bound is trained, whatever takes long or dies.

The age of a token is the version that trains it less the version that sampled it, so the time it
waited for a replica, in a queue, or for its step counts like any other. The trainer's own check
judges.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from loop_setup import House, delays, drive, run, sampled_versions, turns_of

from cartridge_forge.learning.cartridge import VersionLedger
from cartridge_forge.protocols.errors import PublishError, StaleTokenError
from cartridge_forge.protocols.step import Sample, TrainBatch, TrainStepOutput
from cartridge_forge.training.records import Rollout, ScoringCost

bounds = st.integers(0, 4)

firsts = st.integers(0, 3)

DOCUMENT = "patient_01"


class Held:
    """One generator process: the versions it was told, by the generators' own ledger.

    `told` is None for one that was told nothing and never listens: it serves the first version.
    """

    def __init__(self, keep: int, told: Sequence[int] | None) -> None:
        self.deaf = told is None
        self.newest = -1
        self.ledger = VersionLedger(keep)
        for version in told or ():
            self.load(version)

    def load(self, version: int) -> None:
        if not self.deaf and version > self.newest:
            self.ledger.add(version, {DOCUMENT: version}, {DOCUMENT})
            self.newest = version


@dataclass
class Fleet(House):
    """A house whose replicas die at their work, and whose work is then asked again, as by a pool.

    `deaths(phase, step)` is how often. There are two generators; a death takes all that its process
    works on, and its replacement is told the newest `refit` versions (None: it is deaf).
    """

    deaths: Callable[[str, int], int] = lambda phase, step: 0
    refit: int | None = 1
    snapshots: list[int] = field(default_factory=list)
    generators: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.snapshots = sorted(self.published)
        self.generators = [Held(self.keep, self.snapshots) for _ in range(2)]

    @property
    def keep(self) -> int:
        return self.staleness + 2  # as services.roles has it

    def replace(self, dead: Held) -> None:
        told = None if self.refit is None else self.snapshots[-self.refit :]
        self.generators[self.generators.index(dead)] = Held(self.keep, told)

    async def sample(self, step: int, version: int) -> Rollout:
        deaths = self.deaths("rollout", step)
        for attempt in itertools.count():
            await self.work("queue", step)
            generator = self.generators[(step + attempt) % 2]
            held = self.snapshots[0] if generator.deaf else version
            if not generator.deaf:
                generator.ledger.since(DOCUMENT, version)
            self.events.append(("rollout", step, held))
            await self.work("rollout", step)
            if generator in self.generators:
                if attempt >= deaths:
                    break
                self.replace(generator)
        self.events.append(("sampled", step, held))
        sample = Sample(f"{step}/0", DOCUMENT, (4, 5), (step,) * 3, (-0.5,) * 3, (held,) * 3)
        return Rollout(step, (), (), (sample,))

    async def lose(self, phase: str, step: int) -> None:
        """The attempts that came to nothing, and the wait for the one that does not."""
        for _ in range(self.deaths(phase, step)):
            await self.work("queue", step)
            await self.work(phase, step)
        await self.work("queue", step)

    async def score(self, rollout: Rollout) -> tuple[TrainBatch, ScoringCost]:
        await self.lose("score", rollout.step)
        return await super().score(rollout)

    async def train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        await self.lose("train", version)
        return await super().train(batch, version)

    async def publish(self, version: int) -> None:
        self.snapshots.append(version)
        for i in range(len(self.generators)):
            for _ in range(self.deaths("publish", version)):
                await self.work("publish", version)
                self.replace(self.generators[i])
            self.generators[i].load(version)
        await super().publish(version)


def random_fleet(data: st.DataObject, b: int, first: int, refit: int | None) -> Fleet:
    """Every duration and every death is drawn when it comes up."""
    return Fleet(
        b,
        {first},
        turns=lambda phase, step: data.draw(st.integers(0, 6), label=f"turns of {phase} {step}"),
        deaths=lambda phase, step: data.draw(st.integers(0, 2), label=f"deaths in {phase} {step}"),
        refit=refit,
    )


def trained(house: House) -> list[int]:
    return [event[1] for event in house.events if event[0] == "trained"]


def refusals(house: House) -> list[str]:
    return [event[1] for event in house.events if event[0] == "refused"]


async def eager(house: House, steps: int) -> list[tuple[int, int]]:
    """Another loop, with no bound of its own: sample by the newest version all the time, into a
    queue; train whatever is first in it. Returns (version trained, version that sampled)."""
    queue: asyncio.Queue[Rollout] = asyncio.Queue()
    ages: list[tuple[int, int]] = []

    async def sampling() -> None:
        for n in range(steps):
            queue.put_nowait(await house.sample(n, max(house.published)))

    producer = asyncio.create_task(sampling())
    try:
        for version in range(steps):
            rollout = await queue.get()
            ages.append((version, rollout.samples[0].versions[0]))
            batch, _ = await house.score(rollout)
            await house.train(batch, version)
            await house.publish(version + 1)
    except StaleTokenError as error:
        house.events.append(("refused", str(error)))
    finally:
        producer.cancel()
        await asyncio.gather(producer, return_exceptions=True)
    return ages


@given(b=bounds, steps=st.integers(1, 7), first=firsts, data=st.data())
def test_what_is_asked_again_is_sampled_by_the_version_it_was_pinned_to(
    b: int, steps: int, first: int, data: st.DataObject
) -> None:
    """A replacement that is told the newest b + 1 versions can serve every rollout in flight, and
    the run is the undisturbed one."""
    house = random_fleet(data, b, first, b + 1)
    done = run(drive(house, first, steps))
    assert sampled_versions(done) == [(s, first + max(0, s - b)) for s in range(steps)]
    calm = run(drive(Fleet(b, {first}), first, steps))
    assert [d.rollout for d in done] == [d.rollout for d in calm]
    assert [d.output for d in done] == [d.output for d in calm]
    # However often a rollout was begun, each attempt was by its one version, and one counted.
    for s in range(steps):
        begun = [e[2] for e in house.events if e[:2] == ("rollout", s)]
        assert set(begun) == {first + max(0, s - b)}
        assert sum(e[:2] == ("sampled", s) for e in house.events) == 1
    assert trained(house) == list(range(steps))


@given(
    b=bounds, told=st.integers(1, 4), steps=st.integers(1, 7), first=firsts, data=st.data()
)  # fmt: skip
def test_or_it_is_refused(b: int, told: int, steps: int, first: int, data: st.DataObject) -> None:
    """With fewer versions told, a run may end on one that is missing; never on another's tokens."""
    house = random_fleet(data, b, first, told)
    refusal = ""
    try:
        run(drive(house, first, steps))
    except PublishError as error:
        refusal = str(error)
    if refusal:
        assert "is not held here" in refusal
        assert told <= b
    else:
        assert trained(house) == list(range(steps))
    for event in house.events:
        if event[0] in ("rollout", "sampled"):
            assert event[2] == first + max(0, event[1] - b)


@given(b=bounds, steps=st.integers(1, 7), first=firsts, data=st.data())
def test_a_replacement_that_serves_the_first_version_is_caught(
    b: int, steps: int, first: int, data: st.DataObject
) -> None:
    """The check lets pass what is within the bound, and nothing else."""
    house = random_fleet(data, b, first, None)
    refusal = ""
    try:
        run(drive(house, first, steps))
    except StaleTokenError as error:
        refusal = str(error)
    by = {e[1]: e[2] for e in house.events if e[0] == "sampled"}
    caught = min((s for s in by if first + s - by[s] > b), default=steps)
    assert trained(house) == list(range(caught))
    assert refusal.startswith(f"sample {caught}/0 was sampled by version {first}, and") == (
        caught < steps
    )


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
        assert d.output.stale_tokens == (3 if age else 0)

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
    ended = [asyncio.Event() for _ in range(steps)]

    class Waiting(House):
        async def sample(self, step: int, version: int) -> Rollout:
            rollout = await super().sample(step, version)
            ended[step].set()
            return rollout

        async def train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
            for later in ended[version : version + b + 1]:
                await later.wait()
            return await super().train(batch, version)

    house = Waiting(b, {0})

    async def scenario() -> None:
        loop = house.loop(0, steps)
        for step in range(steps):
            await asyncio.wait_for(loop.step(step), 60.0)

    run(scenario())
    for s in range(steps - b):
        assert house.events.index(("sampled", s + b)) < house.events.index(("trained", s))


@pytest.mark.parametrize("b", [1, 2, 4])
def test_the_newest_version_alone_is_not_enough_for_a_replacement(b: int) -> None:
    """The rollout of step b + 1 is pinned to version 1, and takes until version b + 1 is out: the
    newest b + 1 reach down to it. It dies on both generators, and is asked of a replacement."""
    late = ("rollout", b + 1)
    for refit in range(1, b + 2):
        house = Fleet(
            b,
            {0},
            turns=lambda phase, step: 200 if (phase, step) == late else 0,
            deaths=lambda phase, step: 2 if (phase, step) == late else 0,
            refit=refit,
        )
        if refit <= b:
            with pytest.raises(PublishError, match="version 1 is not held here"):
                run(drive(house, 0, b + 3))
            assert trained(house) == list(range(b + 1))
        else:
            done = run(drive(house, 0, b + 3))
            assert sampled_versions(done)[b + 1] == (b + 1, 1)


@pytest.mark.parametrize("b", range(4))
@pytest.mark.parametrize("longer", [1, 2])
def test_a_loop_that_runs_further_ahead_than_the_bound_is_caught(b: int, longer: int) -> None:
    """Step b + 1 is the first whose rollout is still by version 0."""
    house = House(b, {0})

    async def scenario() -> None:
        loop = house.loop(0, 9, staleness=b + longer)
        try:
            for step in range(9):
                await loop.step(step)
        finally:
            await loop.rollouts.close()

    with pytest.raises(StaleTokenError, match=rf"version 0, and version {b + 1} is being trained"):
        run(scenario())
    assert trained(house) == list(range(b + 1))


@pytest.mark.parametrize("b", range(5))
def test_a_rollout_that_waits_in_a_queue_past_the_bound_is_caught(b: int) -> None:
    """Sampling is quick and training slow: all rollouts are by version 0, and the n-th waits in
    the queue until version n. What waited b versions is trained, what waited one more is not."""
    house = House(b, {0}, turns=lambda phase, step: 100 if phase == "train" else 0)
    ages = run(eager(house, 9))
    assert ages == [(n, 0) for n in range(b + 2)]
    assert trained(house) == list(range(b + 1))
    (refusal,) = refusals(house)
    assert refusal.startswith(
        f"sample {b + 1}/0 was sampled by version 0, and version {b + 1} is being trained"
    )


def test_a_queue_that_stays_empty_keeps_rollouts_one_version_old() -> None:
    """Sampling is slow and training quick: the next rollout begins while the one before trains."""
    slow = {"turns": lambda phase, step: 100 if phase == "rollout" else 1}
    assert run(eager(House(1, {0}, **slow), 5)) == [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)]
    strict = House(0, {0}, **slow)
    assert run(eager(strict, 5)) == [(0, 0), (1, 0)]
    assert len(refusals(strict)) == 1


@given(b=bounds, steps=st.integers(1, 9), drawn=delays)
def test_of_a_loop_without_a_bound_the_check_trains_what_is_within_it(
    b: int, steps: int, drawn: list[int]
) -> None:
    house = House(b, {0}, turns=turns_of(drawn))
    ages = run(eager(house, steps))
    fresh = [version - sampler <= b for version, sampler in ages]
    assert all(fresh[:-1])
    assert trained(house) == list(range(sum(fresh)))
    assert len(refusals(house)) == fresh.count(False)


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
