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
    done: Mapping[str, int],
    *,
    running: bool,
    offline_steps: int = 0,
) -> list[RunStage]:
    """Return the stages of a run by its events, those of the last start for the times. `done` are
    the steps of each arm. `offline_steps` are all of the offline arm's, 0 where not known."""
    return list(_Timeline(learn, events, done, running, offline_steps).stages())


class _Timeline:
    def __init__(
        self,
        learn: LearnSpec,
        events: Sequence[Mapping[str, Any]],
        done: Mapping[str, int],
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
        self._done = {arm: done.get(arm, 0) for arm in self._steps}
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
        each = self._seconds_of_an_evaluation()
        for name, arm, kind in _plan(arms):
            begun = self._time
            over, end = self._over(arm, kind)
            if over:
                took = None if end is None or end < begun else end - begun
                self._time = max(begun, end or begun)
                done = self._done[arm] if kind == "train" else 0
                yield RunStage(name, "done", took, 0.0, done, done)
                continue
            state: StageState = "now" if current else "later" if self._running else "left out"
            spent = max(0.0, self._last - begun) if current else 0.0
            left, done, steps = self._left(arm, kind, each, spent)
            whole = None if left is None else left + spent
            yield RunStage(name, state, whole, left, done, steps)
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
        whole = self._offline and self._done[arm] >= self._offline
        return bool(whole) or arm in self._measured, end

    def _left(
        self, arm: str, kind: str, each: float | None, spent: float
    ) -> tuple[float | None, int, int | None]:
        """Return the seconds left of a stage that is not over, the steps done, and all steps."""
        if kind == "train":
            known = self._steps[arm] or self._steps["on_policy"]
            steps = self._learn.train.steps if arm == "on_policy" else self._offline or None
            done = self._done[arm]
            if not known:
                return None, done, steps
            of = [e["seconds"] for e in known[-RECENT_STEPS:]]
            # A rollout of the offline arm was written before its steps.
            one = fmean(s["step"] - (s["rollout"] if arm == "offline" else 0.0) for s in of)
            return max(0, (steps or self._learn.train.steps) - done) * one, done, steps
        if kind == "write":
            rollouts = [e["seconds"]["rollout"] for e in self._steps["on_policy"]]
            left = sum(rollouts) - spent if rollouts else None
            return None if left is None else max(0.0, left), 0, 0
        left = each if kind == "evaluate" else None
        return None if left is None else max(0.0, left - spent), 0, 0

    def _seconds_of_an_evaluation(self) -> float | None:
        """Return the mean seconds of the arms' evaluations so far, None before the second event
        that bounds one."""
        trained = self._steps["offline"]
        begins = {
            "untrained": self._written or self._ready,
            "offline": seconds_of(trained[-1]) if trained else None,
        }
        took, before = [], self._usable
        for arm, end in sorted(self._ends.items(), key=lambda of: of[1]):
            begun = begins.get(arm, before)
            if begun is not None and end > begun:
                took.append(end - begun)
            if arm not in begins:
                before = end
        return fmean(took) if took else None


def _plan(arms: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield name, arm and kind of the stages, in the order of `TrainingRun.go`."""
    yield "start", "", "start"
    if "untrained" in arms and "offline" not in arms:
        yield "evaluate untrained", "untrained", "evaluate"
    yield "train on policy", "on_policy", "train"
    for arm in ("on_policy", "routed", "none", "document"):
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
