"""Run the on-policy loop: rollout -> score -> train -> publish.

    rollout(s)   reads prompts(s) and cartridge version max(0, s - staleness); each completed
                 sample group goes to the teachers at once
    score(s)     waits for rollout(s) and for the sample groups that are not yet scored
    train(s)     waits for score(s) and version s; produces version s + 1
    publish(s)   waits for train(s); unblocks rollout(s + 1 + staleness)

With staleness 0 the steps are strictly sequential, and every token is trained by the version that
sampled it. With staleness b > 0, rollouts of up to b later steps run beside this step's training.
Each is pinned to the version exactly b behind, so a run stays deterministic and no token is older
than b; the trainer checks the age of every token again (`learning.step`). Versions here count from
the arm's first one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from protocols.spec.sections import WarmStartSpec
from services.clients import TrainerClient
from training.recipes.base import Recipe
from training.teacher_scoring import TeacherScoring, score_key, train_scored
from training.timing import PhaseTimer, flat
from training.types import Rollout, RunState, StepRecord, TimedGenerate
from training.validation import OverlappedValidation
from training.weight_sync import WeightSync


class Rollouts:
    """Sample an arm's rollouts, up to `staleness` steps ahead of training. `pending` rollouts were
    saved by a checkpoint, so a resumed run trains the same tokens.

    In a warm start a rollout is text that the teacher wrote; `switched` is called with the 1-based
    number of the first step after it.
    """

    def __init__(
        self,
        course: Recipe,
        generate: TimedGenerate,
        teachers: TeacherScoring,
        state: RunState,
        *,
        steps: int,
        staleness: int,
        warm: WarmStartSpec | None = None,
        switched: Callable[[int], None] = lambda step: None,
        pending: Sequence[Rollout] = (),
    ) -> None:
        self._course, self._generate, self._teachers = course, generate, teachers
        self._state, self._steps, self._staleness = state, steps, staleness
        self._warm, self._switched = warm, switched
        self._written: dict[int, Rollout] = {}  # teacher-written rollouts of later steps
        self._ahead: dict[int, asyncio.Task[Rollout]] = {}
        for rollout in pending:
            self._ahead[rollout.step] = asyncio.ensure_future(_ready(rollout))
        self._preparing: asyncio.TimerHandle | None = None

    async def take(self, step: int) -> Rollout:
        """Start all rollouts that may run beside `step`, and return the rollout of `step`."""
        first = self._state.first_version
        for s in range(step, min(step + self._staleness, self._steps - 1) + 1):
            if s not in self._ahead:
                version = first + max(0, s - self._staleness)
                self._ahead[s] = asyncio.ensure_future(self._sample(s, version))
        return await self._ahead.pop(step)

    def prepare_after(self, step: int) -> None:
        """Prepare the prompts of the next rollout shortly, while the trainer works on `step`."""
        later = step + 1 + self._staleness
        loop = asyncio.get_running_loop()
        self._preparing = loop.call_later(0.001, self._course.prepare, later)

    async def settle(self) -> list[Rollout]:
        """Return the rollouts that run ahead, once complete; they stay pending for a checkpoint."""
        return [await self._ahead[s] for s in sorted(self._ahead)]

    async def close(self) -> None:
        """Cancel the rollouts that run ahead."""
        if self._preparing is not None:
            self._preparing.cancel()
        for task in self._ahead.values():
            task.cancel()
        await asyncio.gather(*self._ahead.values(), return_exceptions=True)
        self._ahead.clear()

    async def _sample(self, step: int, version: int) -> Rollout:
        if self._is_warm(step):
            if step not in self._written:
                written = await self._course.offline(step, self._generate)
                self._written = {r.step: r for r in written}
            return self._written.pop(step)
        key = score_key("on_policy", step)
        complete = partial(self._teachers.begin, key, version)
        rollout = await self._course.sample(step, version, self._generate, complete)
        return replace(rollout, parts=self._teachers.parts(key))

    def _is_warm(self, step: int) -> bool:
        """Return whether a step trains on the teacher's text."""
        warm, state = self._warm, self._state
        if warm is None or state.warm_over:
            return False
        state.warm_over = step >= warm.steps or flat(state.warm, warm.plateau, warm.gain)
        if state.warm_over:
            self._switched(step + 1)
        return not state.warm_over


class OnPolicyLoop:
    """Run the steps of the on-policy arm. `first_version` is the arm's version 0; `watch` is called
    with the name of each phase when it begins."""

    def __init__(
        self,
        course: Recipe,
        rollouts: Rollouts,
        teachers: TeacherScoring,
        trainer: TrainerClient,
        weights: WeightSync,
        validation: OverlappedValidation,
        *,
        first_version: int,
        watch: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.course, self.rollouts, self.teachers = course, rollouts, teachers
        self.trainer, self.weights, self.validation = trainer, weights, validation
        self.first_version, self.watch = first_version, watch

    async def step(self, step: int) -> StepRecord:
        """Make one optimizer update and return its record. Rollouts of later steps keep running."""
        version, key = self.first_version + step, score_key("on_policy", step)
        timer = PhaseTimer(self.watch)

        with timer("rollout"):
            rollout = await self.rollouts.take(step)
        with timer("score"):
            self.validation.begin()  # the generators are idle from here on
            batch = await self.course.lesson(rollout, version)
            batch, scoring = await self.teachers.score(key, batch, version, rollout.parts)
        with timer("train"):
            self.rollouts.prepare_after(step)
            output = await train_scored(self.trainer, self.teachers, key, batch, version)
        with timer("publish"):
            await self.validation.settled()  # it still reads the previous version
            await self.weights.publish(version + 1)

        # A rollout that ran ahead counts only as long as this step waited for it.
        waited = timer.seconds["rollout"]
        compute = min(rollout.compute, waited) + scoring.compute_seconds + output.compute_seconds
        return StepRecord(rollout, output, timer.times(compute), scoring)


async def _ready(rollout: Rollout) -> Rollout:
    return rollout
