"""Measure the seconds of a run: means per phase, the orchestration share, time left."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean

from training.types import StepTimes


class PhaseTimer:
    """Time the phases of one step in wall seconds: `with timer("score"): ...`. Each phase begins
    where the one before ended; `watch` is called with its name."""

    def __init__(self, watch: Callable[[str], None] = lambda phase: None) -> None:
        self.seconds: dict[str, float] = {}
        self._watch, self._last = watch, time.perf_counter()

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._watch(phase)
        yield
        now = time.perf_counter()
        self.seconds[phase], self._last = now - self._last, now

    def times(self, compute: float) -> StepTimes:
        """Return the step's times; `compute` is the model time (seconds) within them."""
        whole = sum(self.seconds.values())
        phases = {p: self.seconds.get(p, 0.0) for p in ("rollout", "score", "train", "publish")}
        return StepTimes(**phases, orchestration=whole - compute, step=whole)


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

    def orchestration_share(self, arm: str) -> float:
        """Return orchestration as a share of the step; 0 before the first step."""
        means = self.means(arm)
        return means["orchestration"] / means["step"] if means else 0.0

    def seconds_left(self, arm: str, steps: int) -> float | None:
        """Return the time for `steps` more steps of this arm at the pace so far."""
        means = self.means(arm)
        return means["step"] * steps if means else None


def flat(kl: Sequence[float], window: int, gain: float) -> bool:
    """Return whether doc_kl has reached a plateau: the mean of the last `window` steps is less than
    the share `gain` below the mean of the `window` before. False for window 0 or too few steps."""
    if not window or len(kl) < 2 * window:
        return False
    before, last = fmean(kl[-2 * window : -window]), fmean(kl[-window:])
    return last > (1 - gain) * before
