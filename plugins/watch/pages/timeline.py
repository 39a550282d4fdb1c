"""Tell where a run is: all of its stages in order, with the seconds they took or may take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import fmean
from typing import Any, Literal

from cartridge_forge.protocols.spec.learn import LearnSpec

RECENT_STEPS = 20  # whose mean stands for the steps to come

StageState = Literal["done", "now", "later", "left out"]


@dataclass(frozen=True)
class RunStage:
    """Hold one stage. `seconds` are those it took, or of a stage that is not over those it may take
    in all; None: not known. `left` are the seconds to its end, 0 of a stage that is over. `steps`
    is 0 of a stage without steps, and None where their number is not known yet."""

    name: str
    state: StageState
    seconds: float | None
    left: float | None
    done: int = 0
    steps: int | None = 0


def stages(
    learn: LearnSpec,
    events: Sequence[Mapping[str, Any]],
    done_steps: Mapping[str, int],
    *,
    running: bool,
    offline_steps: int = 0,
) -> list[RunStage]:
    """Return the stages of a run by its events, those of the last start for the times. `done_steps`
    are the steps of each arm. `offline_steps` are all of the offline arm's, 0 where not known."""
    return list(_Timeline(learn, events, done_steps, running, offline_steps).stages())


class _Timeline:
    def __init__(
        self,
        learn: LearnSpec,
        events: Sequence[Mapping[str, Any]],
        done_steps: Mapping[str, int],
        running: bool,
        offline: int,
    ) -> None:
        starts = [i for i, event in enumerate(events) if event["event"] == "run_started"]
        recent = events[starts[-1] :] if starts else events
        self._learn, self._running, self._offline = learn, running, offline
        self._ends = {e["arm"]: seconds_of(e) for e in recent if e["event"] == "evaluated"}
        self._measured = {e["arm"] for e in events if e["event"] == "evaluated"}
        self._steps: dict[str, list[Mapping[str, Any]]] = {"on_policy": [], "offline": []}
        for event in events:
            if event["event"] == "step":
                self._steps[event["arm"]].append(event)
        self._done = {arm: done_steps.get(arm, 0) for arm in self._steps}
        usable = [seconds_of(e) for e in recent if e["event"] == "usable"]
        self._usable = usable[-1] if usable else None
        self._trained = any(e["event"] == "usable" for e in events)
        offline_saved = (e for e in recent if e["event"] == "checkpoint" and e["arm"] == "offline")
        # A start of the offline arm writes its text, and then a checkpoint.
        self._written = next(map(seconds_of, offline_saved), None)
        ready = [seconds_of(e) for e in recent if e["event"] == "role_ready"]
        self._ready = max(ready, default=None)
        self._time = seconds_of(recent[0]) if recent else 0.0
        self._last = seconds_of(recent[-1]) if recent else 0.0

    def stages(self) -> Iterator[RunStage]:
        arms, current = self._learn.evaluate.arms, self._running
        evaluation_seconds = self._seconds_of_an_evaluation()
        for name, arm, kind in _plan(arms):
            begin = self._time
            ended, end = self._over(arm, kind)
            if ended:
                took = None if end is None or end < begin else end - begin
                self._time = max(begin, end or begin)
                steps_done = self._done[arm] if kind == "train" else 0
                yield RunStage(name, "done", took, 0.0, steps_done, steps_done)
                continue
            state: StageState = "now" if current else "later" if self._running else "left out"
            spent = max(0.0, self._last - begin) if current else 0.0
            remaining, steps_done, steps = self._left(arm, kind, evaluation_seconds, spent)
            total = None if remaining is None else remaining + spent
            yield RunStage(name, state, total, remaining, steps_done, steps)
            current = False

    def _over(self, arm: str, kind: str) -> tuple[bool, float | None]:
        """Return whether a stage is over, and when it was in the last start, if it was."""
        if kind == "start":
            return self._ready is not None, self._ready
        if kind == "evaluate":
            return arm in self._measured, self._ends.get(arm)
        if kind == "write":
            return self._written is not None or bool(self._steps["offline"]), self._written
        last = self._steps[arm][-1] if self._steps[arm] else None
        end = None if last is None else seconds_of(last)
        if arm == "on_policy":
            return self._trained, self._usable or end
        complete = self._offline and self._done[arm] >= self._offline
        return bool(complete) or arm in self._measured, end

    def _left(
        self, arm: str, kind: str, evaluation_seconds: float | None, spent: float
    ) -> tuple[float | None, int, int | None]:
        """Return the seconds left of a stage that is not over, the steps done, and all steps."""
        if kind == "train":
            known_steps = self._steps[arm] or self._steps["on_policy"]
            steps = self._learn.train.steps if arm == "on_policy" else self._offline or None
            steps_done = self._done[arm]
            if not known_steps:
                return None, steps_done, steps
            recent = [e["seconds"] for e in known_steps[-RECENT_STEPS:]]
            # A rollout of the offline arm was written before its steps.
            one = fmean(s["step"] - (s["rollout"] if arm == "offline" else 0.0) for s in recent)
            return max(0, (steps or self._learn.train.steps) - steps_done) * one, steps_done, steps
        if kind == "write":
            rollouts = [e["seconds"]["rollout"] for e in self._steps["on_policy"]]
            remaining = sum(rollouts) - spent if rollouts else None
            return None if remaining is None else max(0.0, remaining), 0, 0
        remaining = evaluation_seconds if kind == "evaluate" else None
        return None if remaining is None else max(0.0, remaining - spent), 0, 0

    def _seconds_of_an_evaluation(self) -> float | None:
        """Return the mean seconds of the arms' evaluations so far, None before the second event
        that bounds one."""
        trained = self._steps["offline"]
        begins = {
            "untrained": self._written or self._ready,
            "offline": seconds_of(trained[-1]) if trained else None,
        }
        took, last_end = [], self._usable
        for arm, end in sorted(self._ends.items(), key=lambda item: item[1]):
            begin = begins.get(arm, last_end)
            if begin is not None and end > begin:
                took.append(end - begin)
            if arm not in begins:
                last_end = end
        return fmean(took) if took else None


def _plan(arms: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, arm and kind of the stages, in the order of `TrainingRun.go`."""
    yield "start", "", "start"
    if "untrained" in arms and "offline" not in arms:
        yield "evaluate untrained", "untrained", "evaluate"
    yield "train on policy", "on_policy", "train"
    for arm in ("on_policy", "routed", "retrieved_cartridge", "none", "document", "retrieved"):
        if arm in arms:
            yield f"evaluate {arm.replace('_', ' ')}", arm, "evaluate"
    if "offline" in arms:
        yield "write offline text", "offline", "write"
        if "untrained" in arms:
            yield "evaluate untrained", "untrained", "evaluate"
        yield "train offline", "offline", "train"
        yield "evaluate offline", "offline", "evaluate"


def seconds_of(event: Mapping[str, Any]) -> float:
    """Return an event's time in seconds since the epoch."""
    return datetime.fromisoformat(event["time"]).timestamp()
