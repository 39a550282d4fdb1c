"""Where the seconds of a run go: means per phase, the orchestration share, time left."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

from services.loop import Rollout, StepTimes


class Timer:
    """Laps of one piece of work, in wall seconds."""

    def __init__(self) -> None:
        self._begun = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> float:
        """Seconds since the last lap, kept under `phase`."""
        now = time.perf_counter()
        self._laps[phase], self._last = now - self._last, now
        return self._laps[phase]

    def times(self, rollout: Rollout, compute: float) -> StepTimes:
        """A step whose rollout was made beforehand: `rollout` keeps its own time, and `compute`
        is the model time of the laps."""
        spent = self._last - self._begun
        return StepTimes(
            rollout=rollout.seconds,
            score=self._laps.get("score", 0.0),
            train=self._laps.get("train", 0.0),
            publish=0.0,
            orchestration=spent - compute + rollout.seconds - rollout.compute,
            step=spent + rollout.seconds,
        )


class Meter:
    """Sums of step times by arm."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._steps: dict[str, int] = defaultdict(int)

    @staticmethod
    def start() -> Timer:
        return Timer()

    def add(self, arm: str, seconds: dict[str, float]) -> None:
        self._steps[arm] += 1
        for phase, value in seconds.items():
            self._sums[arm][phase] += value

    def means(self, arm: str) -> dict[str, float]:
        """Mean seconds of each phase and of the whole step; empty before the first step."""
        return {k: v / self._steps[arm] for k, v in self._sums[arm].items()}

    def orchestration_share(self, arm: str) -> float:
        """Orchestration as a share of the step; 0 before the first step."""
        means = self.means(arm)
        return means["orchestration"] / means["step"] if means else 0.0

    def seconds_left(self, arm: str, steps: int) -> float | None:
        """Time for `steps` more steps of this arm at the pace so far."""
        means = self.means(arm)
        return means["step"] * steps if means else None


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one of the spans (begin, end) covers."""
    total, until = 0.0, -math.inf
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def flat(kl: Sequence[float], window: int, gain: float) -> bool:
    """Whether doc_kl has come to a plateau: the mean of the last `window` steps is no more than
    the share `gain` below that of the `window` before. Window 0, or too few steps: it has not."""
    if not window or len(kl) < 2 * window:
        return False
    before, last = fmean(kl[-2 * window : -window]), fmean(kl[-window:])
    return last > (1 - gain) * before
