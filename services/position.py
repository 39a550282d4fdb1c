"""Where a run stands between two steps: what every checkpoint keeps beside the trainer's state."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Position:
    """Where a run stands, all of it JSON: saved with every checkpoint.

    `step` steps of `arm` are done; `first_version` is the arm's version 0; `arms` the results so
    far; `tokens` trained by each arm; `pending` the rollouts that ran ahead; `course` what the
    course itself has under way; `warm` the doc_kl of every step on the teacher's text, and
    `warm_over` whether those steps are done.
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
