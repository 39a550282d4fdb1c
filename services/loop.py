"""The on-policy loop, over ports: rollout -> score -> train -> publish.

    rollout(s)   consumes prompts(s) and cartridge version max(0, s - staleness); what of it is
                 complete goes to the teachers at once, part by part
    score(s)     waits for rollout(s), and for what the teachers have not scored of it yet
    train(s)     waits for score(s) and version s; produces version s + 1
    publish(s)   waits for train(s); unblocks rollout(s + 1 + staleness)

With staleness 0 this is strictly sequential and every token is trained by the version that
sampled it. With staleness b > 0, rollouts of up to b later steps run beside this step's training,
each pinned to the version exactly b behind, so a run is as deterministic as a strict one and no
token is ever older than b: the trainer checks that again, token by token (`learning.step`).
Versions here count from the arm's first one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from protocols.channels import Lesson
from protocols.episodes import Episode
from protocols.types import Completion, LookUps, Sample, Timed, TrainStepOutput
from services.tasks import Prompt


@dataclass(frozen=True)
class Rollout:
    """What one step samples: samples with what was asked, and how long it took (seconds).

    `compute` is for how much of it any generator computed. Of `episodes`, the samples are the
    turns. `parts` are the ids of samples that the document teacher scores together, where that is
    not all: they are the same whenever it does so.
    """

    step: int
    prompts: Sequence[Prompt]
    completions: Sequence[Completion]
    samples: Sequence[Sample]
    seconds: float
    compute: float
    episodes: Sequence[Episode] = ()
    parts: Sequence[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Judged(Timed):
    """A rollout with all that was found out about it: what a step trains on.

    `compute_seconds` are the teachers' while the step waited for nothing else, `hidden_seconds`
    those beside the rollout. `documents` are the document teacher's look-ups.
    """

    lesson: Lesson = field(default_factory=Lesson)
    hidden_seconds: float = 0.0
    documents: LookUps = field(default_factory=LookUps)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step. `orchestration` is what no model computed. `score` is the waiting: what
    the teachers did beside the rollout is not in it."""

    rollout: float
    score: float
    train: float
    publish: float
    orchestration: float
    step: float


@dataclass(frozen=True)
class Ports:
    """What the loop needs of the mesh; plain functions in tests.

    sample(step, version) -> Rollout, and begins to score it; score(rollout) -> Judged;
    train(judged, version) -> TrainStepOutput; publish(version) makes a version visible to every
    generator.
    """

    sample: Callable[[int, int], Awaitable[Rollout]]
    score: Callable[[Rollout], Awaitable[Judged]]
    train: Callable[[Judged, int], Awaitable[TrainStepOutput]]
    publish: Callable[[int], Awaitable[None]]
    watch: Callable[[str], None] = field(default=lambda phase: None)


@dataclass(frozen=True)
class Done:
    """One finished step, for the record. `hidden` seconds and `documents` are those of `Judged`."""

    rollout: Rollout
    stepped: TrainStepOutput
    times: StepTimes
    hidden: float = 0.0
    documents: LookUps = field(default_factory=LookUps)


class OnPolicyLoop:
    """Runs steps `start`..`steps` - 1. `pending` are rollouts that are ahead of training; a
    checkpoint takes them along, so that a resumed run trains the very same tokens."""

    def __init__(
        self,
        ports: Ports,
        *,
        first_version: int,
        steps: int,
        staleness: int,
        pending: Sequence[Rollout] = (),
    ) -> None:
        self._ports = ports
        self._first = first_version
        self._steps = steps
        self._staleness = staleness
        self._ahead: dict[int, asyncio.Task[Rollout]] = {}
        for rollout in pending:
            self._ahead[rollout.step] = asyncio.ensure_future(_ready(rollout))

    async def step(self, step: int) -> Done:
        """One whole step. Rollouts that run ahead keep running when it returns."""
        begun = time.perf_counter()
        ports = self._ports
        version = self._first + step

        for s in range(step, min(step + self._staleness, self._steps - 1) + 1):
            if s not in self._ahead:
                sampler = self._first + max(0, s - self._staleness)
                self._ahead[s] = asyncio.ensure_future(ports.sample(s, sampler))
        ports.watch("rollout")
        rollout = await self._ahead.pop(step)
        sampled = time.perf_counter()

        ports.watch("score")
        judged = await ports.score(rollout)
        scored = time.perf_counter()

        ports.watch("train")
        stepped = await ports.train(judged, version)
        trained = time.perf_counter()

        ports.watch("publish")
        await ports.publish(version + 1)
        ended = time.perf_counter()

        # Of a rollout that ran ahead only the waiting belongs to this step.
        waited = sampled - begun
        compute = min(rollout.compute, waited) + judged.compute_seconds + stepped.compute_seconds
        times = StepTimes(
            rollout=waited,
            score=scored - sampled,
            train=trained - scored,
            publish=ended - trained,
            orchestration=ended - begun - compute,
            step=ended - begun,
        )
        return Done(rollout, stepped, times, judged.hidden_seconds, judged.documents)

    async def settle(self) -> list[Rollout]:
        """Wait for the rollouts that run ahead; they stay pending. For a checkpoint."""
        return [await self._ahead[s] for s in sorted(self._ahead)]

    async def close(self) -> None:
        """Cancel whatever runs ahead."""
        for task in self._ahead.values():
            task.cancel()
        await asyncio.gather(*self._ahead.values(), return_exceptions=True)
        self._ahead.clear()


async def _ready(rollout: Rollout) -> Rollout:
    return rollout
