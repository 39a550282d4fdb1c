"""Bounded staleness: no token older than the bound is trained, whatever takes long or dies.

The age of a token is the version that trains it less the version that sampled it, so the time it
waited for a replica, in a queue, or for its step counts like any other. The trainer's own check
judges.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from loop_setup import House, drive, run, sampled_versions

from learning.cartridge.versions import VersionLedger
from protocols.errors import PublishError, StaleTokenError
from protocols.train_batch import TrainBatch
from protocols.types import Sample, TrainStepOutput
from training.types import Rollout, ScoringCost

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
            self.ledger.add(version, (DOCUMENT,))
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
                generator.ledger.index(DOCUMENT, version)
            self.events.append(("rollout", step, held))
            await self.work("rollout", step)
            if generator in self.generators:
                if attempt >= deaths:
                    break
                self.replace(generator)
        self.events.append(("sampled", step, held))
        sample = Sample(f"{step}/0", DOCUMENT, (4, 5), (step,) * 3, (-0.5,) * 3, (held,) * 3)
        return Rollout(step, (), (), (sample,), 0.0, 0.0)

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


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=80, deadline=None)
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


@settings(max_examples=80, deadline=None)
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
