"""A fake house for the on-policy loop: generator, teacher and trainer that write down what happens.

A fake's work takes a number of turns of the event loop, which stand for time: no test sleeps.
`run_with` drives a real small run from the test's own process instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import strategies as st
from small_run import MESH, SMALL

from cartridge_forge.learning.step import check_fresh
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.watch.telemetry.hub import open_sinks
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Sample,
    TeacherScores,
    TensorLayout,
    TensorRef,
    TrainBatch,
    TrainStepOutput,
)
from cartridge_forge.services.mesh import open_mesh, spawn_roles
from cartridge_forge.services.run_directory import RunDirectory
from cartridge_forge.services.run_log import RunLog
from cartridge_forge.training.loop import OnPolicyLoop, Rollouts, RunState
from cartridge_forge.training.recipe import open_recipe
from cartridge_forge.training.records import Rollout, ScoringCost, StepRecord, WorkTime
from cartridge_forge.training.training_run import TrainingRun

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

    def work_time(self, begin: float, end: float) -> WorkTime:
        return WorkTime()

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
        sample = Sample(
            f"{step}/0",
            "patient_01",
            (4, 5),
            ids,
            (-0.5,) * 3,
            (held,) * 3,
            contexts=("patient_01",),
        )
        return Rollout(step, (), (), (sample,))

    async def score(self, rollout: Rollout) -> tuple[TrainBatch, ScoringCost]:
        step = rollout.step
        self.events.append(("score", step))
        await self.work("score", step)
        scores = TeacherScores((0,), TensorRef(f"scores/{step}", TensorLayout(())))
        return TrainBatch(
            doc=tuple(rollout.samples), scores={"doc_teacher": (scores,)}
        ), ScoringCost()

    async def train(self, batch: TrainBatch, version: int) -> TrainStepOutput:
        samples, (packet,) = batch.doc, batch.packets
        step = int(packet.key.removeprefix("scores/"))
        assert samples[0].id == f"{step}/0", "the scores of another step"
        stale = check_fresh(samples, version, self.staleness)
        self.events.append(("train", step, version))
        await self.work("train", step)
        self.events.append(("trained", step))
        return TrainStepOutput(0.0, version=version + 1, tokens=3, stale_tokens=stale)

    async def publish(self, version: int) -> None:
        await self.work("publish", version)
        if self.publishes:
            self.published.add(version)
        self.events.append(("publish", version))

    def loop(
        self,
        first: int,
        steps: int,
        pending: Sequence[Rollout] = (),
        staleness: int | None = None,
        watch: Callable[[str], None] = lambda phase: None,
    ) -> OnPolicyLoop:
        """The real loop; its staleness is the house's, unless it breaks the bound."""
        bound = self.staleness if staleness is None else staleness
        ports: Any = Collaborators(self)
        rollouts = Rollouts(
            ports, ports.generate, ports, RunState(first_version=first),
            steps=steps, staleness=bound, pending=pending,
        )  # fmt: skip
        return OnPolicyLoop(
            ports,
            rollouts,
            ports,
            ports,
            ports,
            ports,
            first_version=first,
            work_times=self.work_time,
            watch=watch,
        )


class Collaborators:
    """A house as the loop's collaborators: course, teachers, trainer, weights and validation."""

    def __init__(self, house: House) -> None:
        self._house = house
        self.row, self.prepared = None, list[int]()

    def ahead(self, version: int) -> CartridgeSnapshot:
        return CartridgeSnapshot(version, ())

    async def step(
        self, batch: TrainBatch, version: int, there: CartridgeSnapshot
    ) -> TrainStepOutput:
        return replace(await self._house.train(batch, version), published=there)

    async def publish(self, version: int, put: CartridgeSnapshot) -> None:
        assert put.version == version
        await self._house.publish(version)

    async def generate(self, requests: Any, replied: Any = None) -> Any:
        raise AssertionError("a house samples by itself")

    async def sample(self, step: int, version: int, generate: Any, complete: Any) -> Rollout:
        return await self._house.sample(step, version)

    def prepare(self, step: int) -> None:
        self.prepared.append(step)

    def parts(self, key: str) -> tuple[tuple[str, ...], ...]:
        return ()

    def repeated(self, rollout: Rollout) -> frozenset[str]:
        return frozenset()

    async def train_batch(self, rollout: Rollout, version: int) -> TrainBatch:
        batch, self._cost = await self._house.score(rollout)
        return batch

    async def score(
        self, key: str, batch: TrainBatch, version: int, parts: Any, begun: float, repeated: Any
    ) -> tuple[TrainBatch, ScoringCost]:
        return batch, self._cost

    def trained(self, key: str, batch: TrainBatch) -> None:
        pass

    def begin(self) -> None:
        pass

    def completed(self) -> None:
        pass

    async def settled(self) -> None:
        pass


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


async def drive(house: House, first: int, steps: int) -> list[StepRecord]:
    loop = house.loop(first, steps)
    try:
        return [await loop.step(step) for step in range(steps)]
    finally:
        await loop.rollouts.close()


def sampled_versions(done: Sequence[StepRecord]) -> list[tuple[int, int]]:
    """(step, version) of every token's version, checked to be one a step."""
    pairs = []
    for d in done:
        (version,) = {v for s in d.rollout.samples for v in s.versions}
        pairs.append((d.rollout.step, version))
    return pairs


# At least one turn each: what takes no time at all leaves no room for anything beside it.
delays = st.lists(st.integers(1, 6), min_size=5, max_size=5)


def turns_of(drawn: list[int]) -> Turns:
    """A duration for every phase of every step, from a few drawn numbers."""
    phases = {"rollout": 1, "score": 2, "train": 3, "publish": 4}
    return lambda phase, step: drawn[(phases[phase] * (step + 1)) % len(drawn)]


def small_spec(**more: object) -> RunSpec:
    sets = {**SMALL, "evaluate.arms": "[on_policy]", "evaluate.probe_every": 0}
    sets |= {"roles.generator.replicas": 1, "plane": "shared_memory"}
    sets |= {key.replace("__", "."): value for key, value in more.items()}
    return load_spec(
        str(MESH), sets=[f"{k}={'null' if v is None else v}" for k, v in sets.items()]
    ).spec


async def run_with(spec: RunSpec, directory: RunDirectory) -> TrainingRun:
    """A run driven from this process, without a controller."""

    async def nothing(run: TrainingRun) -> None:
        pass

    return await between_steps(spec, directory, nothing)


async def between_steps(
    spec: RunSpec, directory: RunDirectory, work: Callable[[TrainingRun], Awaitable[None]]
) -> TrainingRun:
    """The same, with some `work` before each step."""
    hub = open_sinks(spec, directory, lambda sink, message: None)
    recorder = RunLog(directory, hub)
    mesh = await open_mesh(spec, recorder.event, recorder.span)
    try:
        course = open_recipe(spec, mesh)
        await spawn_roles(
            spec, course.documents, course.layout.contexts, course.end_ids, mesh, directory
        )
        run = TrainingRun(
            spec,
            course,
            mesh,
            directory,
            recorder,
            lambda **_: None,
            lambda _: None,
            lambda _: work(run),
        )
        await run.go()
        return run
    finally:
        await mesh.stop()
        await asyncio.to_thread(recorder.close)
