"""Define the status of a run, its pools and replicas: for display, `forge status` and metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class ReplicaState(StrEnum):
    """State whether a replica is given requests.

        (start) -> DEAD -> HEALTHY <-> SUSPECT -> DEAD      DRAINING -> (removed)

    DEAD is also the state of a replica that is being started. It becomes HEALTHY only once it has
    every update that the other replicas of its pool have, above all the current cartridge.
    """

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"
    DEAD = "dead"


MOST = 2**32 - 1  # of a number that control.proto carries


@dataclass(frozen=True)
class ReplicaStatus:
    """Describe one replica now. `name` is "generator[1]". `pid` is 0 without a process, and that of
    rank 0 with several. `ongoing` counts the requests it works on. `version` is the newest
    cartridge version it has (-1 for none). `memory_bytes` is the resident memory of all its
    processes at the last heartbeat."""

    name: str
    state: ReplicaState
    host: str
    pid: int
    ongoing: int
    version: int
    memory_bytes: int


@dataclass(frozen=True)
class PoolStatus:
    """Describe one pool now, with its counts since the run started.

    `target` is how many replicas it should have, `waiting` the requests that no replica has yet,
    `requests` those that succeeded, `failures` those that failed, `retries` the attempts after a
    request's first, `restarts` the replicas that died and were restarted, `engine_deaths` those of
    them whose engine died in a step.
    """

    role: str
    target: int
    waiting: int
    replicas: tuple[ReplicaStatus, ...]
    requests: int
    failures: int
    retries: int
    restarts: int
    engine_deaths: int = 0


@dataclass(frozen=True)
class RunStatus:
    """Describe a run now. Plain data, so it crosses processes unchanged.

    `RunStatus(stage="training on_policy", arm="on_policy", step=12, steps=300, kl=0.43,
    accuracy=0.71, version=12, tokens_per_second=1834.0, phase="score", phase_seconds={"rollout":
    0.21, "score": 0.1}, seconds_left=190.0)`

    `stage` is a phrase for people ("evaluating document"), `phase` the part of the step now in
    progress, of an evaluation "24 of 48 answers", `phase_seconds` the mean seconds of each phase so
    far. `step` is the last finished step of `arm` (0 before the first) out of `steps`, `reward` the
    mean of its episodes, if it has any. `accuracy` is the arm's last measured, of which `measure`
    says what it is: "accuracy", or "agreement" with the teacher. `seconds_left` is that
    of the whole run. None means: not known yet.
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
    paused: bool = False
    pools: tuple[PoolStatus, ...] = ()
    done: bool = False
    error: str | None = None
    reward: float | None = None
    measure: str = "accuracy"
