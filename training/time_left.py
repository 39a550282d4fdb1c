"""Estimate the seconds until a run's end: its steps, and the evaluations of every arm."""

from __future__ import annotations

from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.training.loop import PhaseTimes, RunState


class TimeLeft:
    """Estimate from the steps and answers so far: the mean step of each arm, and the mean seconds
    of a question. An arm that has not begun counts with what is known of the one before it."""

    def __init__(self, learn: LearnSpec, times: PhaseTimes) -> None:
        self._train, self._evaluate, self._times = learn.train, learn.evaluate, times
        self._seconds, self._answered, self._questions = 0.0, 0, learn.evaluate.questions
        self.offline_steps: int | None = None  # once its text is written

    def answered(self, questions: int, seconds: float, *, all_of_them: bool) -> None:
        """Count the time of so many answered questions; `all_of_them` are those of an arm."""
        self._seconds, self._answered = self._seconds + seconds, self._answered + questions
        if all_of_them:
            self._questions = questions

    def seconds(self, state: RunState) -> float | None:
        """Return the seconds left, None before the first step of this start."""
        offline, mine = self._times.means("offline"), self._times.means("on_policy")
        if not (offline or mine):
            return None
        arms = [arm for arm in self._evaluate.arms if arm not in state.arms]
        per_question = self._seconds / self._answered if self._answered else 0.0
        remaining = len(arms) * (1 + self._evaluate.sampled) * self._questions * per_question
        if state.arm == "on_policy":
            remaining += (self._train.steps - state.step) * mine["step"]
        if "offline" not in arms:
            return remaining
        steps_done = state.step if state.arm == "offline" else 0
        steps = max(0, (self.offline_steps or self._train.steps) - steps_done)
        measured = offline or mine
        # Text that is written takes no more time: a step's `rollout` was spent before it.
        spent = measured["rollout"] if self.offline_steps is not None else 0.0
        return remaining + steps * (measured["step"] - spent)
