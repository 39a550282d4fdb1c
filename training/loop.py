"""Run the on-policy loop: rollout -> score -> train -> publish.

    rollout(s)   reads prompts(s) and cartridge version max(0, s - staleness); each completed
                 sample group goes to the teachers at once, unless it is small
    score(s)     waits for rollout(s) and for the sample groups that are not yet scored
    train(s)     waits for score(s) and version s; produces version s + 1
    publish(s)   waits for train(s); unblocks rollout(s + 1 + staleness)

With staleness 0 the steps are strictly sequential, and every token is trained by the version that
sampled it. With staleness b > 0, rollouts of up to b later steps run beside this step's training.
Each is pinned to the version exactly b behind, so a run stays deterministic and no token is older
than b; the trainer checks the age of every token again (`learning.step`). Versions here count from
the arm's first one.

Validation of step s runs beside the next step, while the generators are idle:

    step s ends, its row is held  ->  rollout s + 1  ->  validation beside scoring and training
    ->  the row is written  ->  publish s + 1

The generators hold the measured version until the next publish, which waits for validation. So
validation costs a step only the time by which it outlasts scoring and training.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.spec.sections import WarmStartSpec
from cartridge_forge.services.clients import TrainerClient
from cartridge_forge.training.recipe import Recipe
from cartridge_forge.training.records import GenerateCall, Rollout, StepRecord, StepTimes, WorkTime
from cartridge_forge.training.scoring import TeacherScoring, score_key, train_scored
from cartridge_forge.training.weight_sync import WeightSync

WorkTimes = Callable[[float, float], WorkTime]
"""Return what worked between two times of `time.perf_counter`."""


@dataclass(frozen=True)
class WritingTime:
    """Hold the seconds of one teacher-written rollout in the mean, and what worked in them."""

    seconds: float
    work: WorkTime


@dataclass
class RunState:
    """Hold the position of a run between two steps, all of it JSON: saved with every checkpoint.

    `step` steps of `arm` are done; `first_version` is the arm's version 0; `arms` holds the results
    so far, `tokens` the tokens trained by each arm, `pending` the rollouts that ran ahead. `course`
    is the recipe's own state, `warm` the doc_kl of every warm-start step. `warm_over` is true once
    the warm start has ended. `verified` sums the counts of verified rollouts
    (`protocols.records.run_files.VerifiedResult`). `held` is the step's row where it waits for its
    validation, which no checkpoint has.
    """

    arm: str = "on_policy"
    step: int = 0
    first_version: int = 0
    arms: dict[str, Any] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rollouts: int = 0
    stale_tokens: int = 0
    kl_first: float | None = None
    kl_last: float | None = None
    pending: list[dict[str, Any]] = field(default_factory=list)
    course: dict[str, Any] = field(default_factory=dict)
    warm: list[float] = field(default_factory=list)
    warm_over: bool = False
    verified: dict[str, float] = field(default_factory=dict)
    held: dict[str, Any] | None = None

    @property
    def version(self) -> int:
        """Return the cartridge version after the steps done."""
        return self.first_version + self.step


class OnPolicyLoop:
    """Run the steps of the on-policy arm. `first_version` is the arm's version 0; `watch` is called
    with the name of each phase when it begins."""

    def __init__(
        self,
        recipe: Recipe,
        rollouts: Rollouts,
        teachers: TeacherScoring,
        trainer: TrainerClient,
        weights: WeightSync,
        validation: OverlappedValidation,
        *,
        first_version: int,
        work_times: WorkTimes,
        watch: Callable[[str], None] = lambda phase: None,
    ) -> None:
        self.recipe, self.rollouts, self.teachers = recipe, rollouts, teachers
        self.trainer, self.weights, self.validation = trainer, weights, validation
        self.first_version, self.work_times, self.watch = first_version, work_times, watch

    async def step(self, step: int) -> StepRecord:
        """Make one optimizer update and return its record. Rollouts of later steps keep running."""
        version, key = self.first_version + step, score_key("on_policy", step)
        timer = PhaseTimer(self.work_times, self.watch)

        with timer("rollout"):
            rollout = await self.rollouts.take(step)
        with timer("score") as timing:
            self.validation.begin()  # the generators are idle from here on
            batch = await self.recipe.train_batch(rollout, version)
            batch, scoring = await self.teachers.score(
                key, batch, version, rollout.parts, timing, self.recipe.repeated(rollout)
            )
        with timer("train"):
            if self.validation.row is None:  # an environment may have no room for both
                self.rollouts.prepare_after(step)
            snapshot = self.weights.ahead(version + 1)
            output = await train_scored(self.trainer, self.teachers, key, batch, version, snapshot)
        with timer("publish"):
            await self.validation.settled()  # it still reads the previous version
            await self.weights.publish(version + 1, output.published)

        return StepRecord(rollout, output, timer.times(), scoring)


class Rollouts:
    """Sample an arm's rollouts, up to `staleness` steps ahead of training. `pending` rollouts were
    saved by a checkpoint, so a resumed run trains the same tokens.

    In a warm start a rollout is text that the teacher wrote; `switched` is called with the 1-based
    number of the first step after it.
    """

    def __init__(
        self,
        recipe: Recipe,
        generate: GenerateCall,
        teachers: TeacherScoring,
        state: RunState,
        *,
        steps: int,
        staleness: int,
        warm: WarmStartSpec | None = None,
        switched: Callable[[int], None] = lambda step: None,
        pending: Sequence[Rollout] = (),
    ) -> None:
        self._recipe, self._generate, self._teachers = recipe, generate, teachers
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
        if later >= self._steps or (self._warm is not None and not self._state.warm_over):
            return
        loop = asyncio.get_running_loop()
        self._preparing = loop.call_later(0.001, self._recipe.prepare, later)

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
                rollouts = await self._recipe.offline(step, self._generate)
                self._written = {r.step: r for r in rollouts}
            return self._written.pop(step)
        key = score_key("on_policy", step)
        complete = partial(self._teachers.completed, key, version)
        rollout = await self._recipe.sample(step, version, self._generate, complete)
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


async def _ready(rollout: Rollout) -> Rollout:
    return rollout


def flat(kl: Sequence[float], window: int, gain: float) -> bool:
    """Return whether doc_kl has reached a plateau: the mean of the last `window` steps is less than
    the share `gain` below the mean of the `window` before. False for window 0 or too few steps."""
    if not window or len(kl) < 2 * window:
        return False
    previous, last = fmean(kl[-2 * window : -window]), fmean(kl[-window:])
    return last > (1 - gain) * previous


class OverlappedValidation:
    """Measure held-out accuracy with `measure`, then write the waiting row with `tell`.

    `settled` may be called again after it was cancelled: a last checkpoint then writes the row.
    """

    def __init__(
        self, measure: Callable[[int], Awaitable[float]], tell: Callable[[MetricRow], None]
    ) -> None:
        self._measure, self._tell = measure, tell
        self.row: MetricRow | None = None  # the row that waits for its measurement
        self._task: asyncio.Future[float] | None = None

    def hold(self, row: MetricRow) -> None:
        """Keep a step's row until its version is measured; one row at a time."""
        assert self.row is None, "the row before was not settled"
        self.row = row

    def begin(self) -> None:
        """Start to measure the held row's version, unless a measurement runs already."""
        if self.row is not None and (self._task is None or self._task.cancelled()):
            self._task = asyncio.ensure_future(self._measure(self.row.version))

    async def settled(self) -> None:
        """Wait for the measurement and write its row; return at once without one. An error of
        `measure` is raised, and no row written."""
        self.begin()
        if self.row is None or self._task is None:
            return
        accuracy = await self._task
        row, self.row, self._task = self.row, None, None
        self._tell(replace(row, accuracy=accuracy))


class PhaseTimer:
    """Time the phases of one step in wall seconds: `with timer("score") as begun: ...`. Each phase
    begins where the one before ended; `watch` is called with its name."""

    def __init__(
        self, work_times: WorkTimes, watch: Callable[[str], None] = lambda phase: None
    ) -> None:
        self._seconds: dict[str, float] = {}
        self._work_times, self._watch = work_times, watch
        self._begun = self._last = time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[float]:
        self._watch(phase)
        yield self._last
        now = time.perf_counter()
        self._seconds[phase], self._last = now - self._last, now

    def times(self, writing: WritingTime | None = None) -> StepTimes:
        """Return the step's times. The rollout took `written` where it was made before the step."""
        work = self._work_times(self._begun, self._last)
        seconds = dict.fromkeys(("rollout", "score", "train", "publish"), 0.0) | self._seconds
        if writing is not None:
            seconds["rollout"] = writing.seconds
            work = WorkTime(
                work.model + writing.work.model, work.environment + writing.work.environment
            )
        total = sum(seconds.values())
        return StepTimes(
            **seconds, environment=work.environment,
            orchestration=total - work.model - work.environment, step=total,
        )  # fmt: skip


class PhaseTimes:
    """Sum step times by arm."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._steps: dict[str, int] = defaultdict(int)

    def add(self, arm: str, seconds: dict[str, float]) -> None:
        self._steps[arm] += 1
        for phase, value in seconds.items():
            self._sums[arm][phase] += value

    def means(self, arm: str) -> dict[str, float]:
        """Return mean seconds of each phase and of the whole step; empty before the first step."""
        return {k: v / self._steps[arm] for k, v in self._sums[arm].items()}

    def step_seconds(self) -> dict[str, float]:
        """Return the mean seconds of a whole step by arm."""
        return {arm: self.means(arm)["step"] for arm in self._steps}

    def orchestration_share(self, arm: str) -> float:
        """Return orchestration as a share of the step; 0 before the first step."""
        means = self.means(arm)
        return means["orchestration"] / means["step"] if means else 0.0
