"""Where a run stands: what the display polls from the controller."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RunStatus:
    """One look at a run. Plain data, so it crosses processes as it is.

    `RunStatus(stage="training on_policy", arm="on_policy", step=12, steps=300, kl=0.43,
    accuracy=0.71, version=12, tokens_per_second=1834.0, phase="score",
    phase_seconds={"rollout": 0.21, "score": 0.1}, seconds_left=190.0)`

    `stage` is a phrase for people ("evaluating document"), `phase` the part of the step now in
    progress, `phase_seconds` the mean seconds of each phase so far. `step` is the last finished
    step of `arm` (0 before the first) out of `steps`. None means: not known yet.
    """

    stage: str = "starting"
    arm: str = ""
    step: int = 0
    steps: int = 0
    kl: float | None = None
    accuracy: float | None = None
    version: int = 0
    tokens_per_second: float | None = None
    phase: str = ""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    seconds_left: float | None = None
    message: str = ""
    done: bool = False
    error: str | None = None
