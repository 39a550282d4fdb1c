"""Define the rows of a run's JSON-lines files, and results.json.

`metrics.jsonl` holds numbers that the seed alone decides, so that two runs of one seed are equal
byte for byte. Times, and all else that depends on a clock, go to `events.jsonl`.

`chat.json` holds the date that the run's chat template may write: the templates of Llama 3, Granite
3, SmolLM3 and gpt-oss write the day into every conversation. A run has one date from its beginning
on, also where it is resumed days later; prompts over its cartridges are rendered with that date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.files import write_atomically

TERMS = "terms.json"  # the words of the texts that cartridges learned (registry.terms)
ARMS = ("none", "document", "untrained", "offline", "on_policy")  # the order they are shown in
TRAINED_ARMS = ("on_policy", "offline")  # the order they are trained in
PHASES = ("rollout", "score", "train", "publish")  # the parts of one step
WITHIN = ("environment", "orchestration")  # of them: only an environment worked, and nothing did

RunOutcome = Literal["finished", "stopped", "failed"]
EventName = Literal[
    "run_started",
    "preparing",  # cartridges, total, seconds_left: of a start that takes time, for each cartridge
    "role_ready",
    # {"time": "2026-07-26T10:15:42.120Z", "event": "step", "arm": "on_policy", "step": 12,
    # "seconds": {"rollout": 0.4, "score": 0.1, "train": 0.3, "publish": 0.01, "environment":
    # 0.0, "orchestration": 0.02, "step": 0.83}, "tokens_per_second": 978.3, "hidden": 0.05,
    # "documents": {"hits": 4, "host_hits": 0, "misses": 0, "evictions": 0}}: wall seconds of the
    # step and of its phases.
    # `hidden` are seconds that the teachers computed beside the rollout; they are in no phase.
    # `documents` are the document teacher's `protocols.step.CacheStats`, which depend on what was
    # replaced.
    "step",
    "publish",
    "usable",  # version, cartridges: trained and in a checkpoint; what follows measures them
    "warned",  # message
    "evaluated",
    "checkpoint",
    "stopping",
    "engine",
    "replica_lost",  # role, replica, reason
    "replica_back",  # role, replica, seconds since it was lost, pid
    "replica_moved",  # role, replica: to a host that returned, or off one that is drained
    "host_joined",  # host, role ("" for any): also when a silent host answers again
    "host_drained",  # host, reason, seconds until nothing ran there any more
    "host_lost",  # host, reason, seconds
    "host_refused",  # host, reason: it connected and cannot be used
    "relay_lost",  # host, reason
    "relay_back",  # host, seconds since the one before it was lost
    "scaled",  # role, replicas, before, by
    "paused",
    "resumed",
    "switched",  # step: the first on policy after a warm start
    "stalled",  # message, stacks
    "healed",  # message: what was torn or damaged, and left out or cut off
    "sink_failed",  # sink, message
    "failed",
    "finished",
]


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """Hold one training step of metrics.jsonl: numbers only, no times.

    `{"arm": "on_policy", "step": 12, "version": 12, "kl": 0.431, "grad_norm": 0.87, "lr": 0.02,
    "tokens": 812, "stale_tokens": 0, "accuracy": null}`
    `step` counts from 1 in each arm. `kl` is null without document distillation, and `accuracy`
    without a validation at this step. `sampler_gap` is that of `TrainStepOutput`, left out where no
    token was compared. `cartridges` holds the updates of the cartridges that had a loss:

        {"cartridges": {"patient_01": {"lr": 0.02, "grad_norm": 0.3, "step": 12, "tokens": 212}}}

    Four more fields are left out where they are empty. `verified` has the counts of
    `VerifiedCounts` and the share of the judged tokens that were accepted:

        {"verified": {"proposed": 320, "judged": 250, "accepted": 210, "taught": 40, "share": 0.84}}

    `channels` holds the value, denominator
    ("count"), weight and facts of every channel with a weight, unless that is doc_kl alone.
    Episodes add `cosines` between channels' gradients, and `episodes`, counts and means over the
    step's episodes:

        {"channels": {"grpo": {"value": -0.02, "count": 512, "weight": 1.0}, ...},
         "cosines": {"doc_kl/grpo": 0.31}, "episodes": {"count": 64, "reward": 0.42, "errored": 0}}
    """

    arm: str
    step: int
    version: int
    kl: float | None
    grad_norm: float
    lr: float
    tokens: int
    stale_tokens: int
    accuracy: float | None = None
    channels: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    cosines: Mapping[str, float] = field(default_factory=dict)
    sampler_gap: Mapping[str, float] = field(default_factory=dict)
    episodes: Mapping[str, float] = field(default_factory=dict)
    cartridges: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    verified: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """Hold one sampled response of rollouts.jsonl, enough to score it again.

    `{"schema": 1, "arm": "on_policy", "step": 12, "id": "train/12/0", "document": "patient_01",
    "kind": "summarise", "prompt_ids": [4, 91], "response_ids": [17, 2],
    "sampler_logprobs": [-0.31, -0.02], "versions": [11, 11],
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 64},
    "finish_reason": "stop", "text": "metformin", "cartridge": "patient_01",
    "contexts": ["patient_01"]}`
    `document` is what the prompt is about. `text` is the decoded response, for people; the ids are
    what was trained on. `composed`, `cartridge`, `contexts`, `taught` and `masked` are those of
    `protocols.step.Sample`; the last two are left out where they are empty.
    """

    schema: int = 1
    arm: str
    step: int
    id: str
    document: str
    kind: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    sampling: dict[str, float | int]
    finish_reason: str
    text: str
    composed: tuple[str, ...] = ()
    cartridge: str
    contexts: tuple[str, ...]
    taught: tuple[int, ...] = ()
    masked: tuple[int, ...] = ()


class MeasuredAccuracy(TypedDict):
    """Hold the accuracy on n held-out questions. Answers that name no option are `parse_failures`
    and count as wrong.

    `{"accuracy": 0.88, "ci95": [0.828, 0.918], "n": 200, "parse_failures": 1}`. With `populations`
    the accuracy is that of the last population, and parse failures count its candidates. With
    `agreement` alone the accuracy is the share of tokens in it; with `f1` too, it is that of a
    user's own questions. The other mappings are of plug-ins (`plugins.statistics.results`).
    Episodes that an environment or a reward failed to judge are `not_judged`, with `why_not`, and
    not among the n.
    """

    accuracy: float
    ci95: list[float]
    n: int
    parse_failures: int
    populations: NotRequired[Mapping[str, Any]]
    agreement: NotRequired[Mapping[str, Any]]
    f1: NotRequired[float]
    reward: NotRequired[float]
    reward_ci95: NotRequired[list[float]]
    rules: NotRequired[Mapping[str, Any]]
    not_judged: NotRequired[int]
    why_not: NotRequired[str]


class ArmResult(MeasuredAccuracy):
    """Hold the accuracy of an arm: greedy, and `sampled` (None where only greedy was run). The arm
    on_policy has the router's accuracy on the same questions, if there are several cartridges."""

    sampled: MeasuredAccuracy | None
    routing: NotRequired[Mapping[str, Any]]


class KlResult(TypedDict):
    """Hold the mean doc_kl per token of the on-policy arm: `{"first": 2.31, "last": 0.41}`."""

    first: float | None
    last: float | None


class VerifiedResult(TypedDict):
    """Hold the counts of all verified rollouts (`VerifiedCounts`), and the
    share of the judged tokens that the teacher accepted in the first and in the last step that had
    some: `{"proposed": 3200, "judged": 2500, "accepted": 2100, "taught": 400, "first": 0.61,
    "last": 0.93}`."""

    proposed: int
    judged: int
    accepted: int
    taught: int
    first: float
    last: float


class Compression(TypedDict):
    """Hold mean KV tokens: `{"document_tokens": 1180.0, "cartridge_tokens": 128, "ratio": 9.2}`."""

    document_tokens: float
    cartridge_tokens: int
    ratio: float


class PolicyCounts(TypedDict):
    """Count samples for training: `{"rollouts": 4800, "tokens": 243600, "stale_tokens": 0}`."""

    rollouts: int
    tokens: int
    stale_tokens: int


class CpuShare(TypedDict):
    """Hold processor seconds since all roles stood: of controller and client, of all processes, and
    the first's share of the second: `{"orchestration": 1.9, "all": 48.2, "share": 0.039}`."""

    orchestration: float
    all: float
    share: float


class RunResults(TypedDict):
    """Hold results.json. A run that ended early has only the arms that it measured.

    `phases` is mean seconds per phase, `orchestration_share` the part of a step in which neither a
    model nor an environment worked, `tokens_trained` the tokens of each trained arm:
    `{"on_policy": 243600, ...}`, `step_seconds` the mean seconds of its steps since the run began
    or was resumed. `warm_steps` of the on-policy arm were on the teacher's text.
    `verified` is of runs with verified rollouts.
    `gold` is of runs whose questions have right answers. `cpu` is of runs whose processes are all
    on one host.
    """

    arms: dict[str, ArmResult]
    kl: KlResult
    compression: Compression
    policy: PolicyCounts
    phases: dict[str, float]
    orchestration_share: float
    wall_seconds: float
    tokens_trained: dict[str, int]
    step_seconds: NotRequired[dict[str, float]]  # not in files written before it was kept
    status: RunOutcome
    warm_steps: NotRequired[int]
    aggregation: NotRequired[Mapping[str, Any]]
    gold: NotRequired[Mapping[str, Any]]
    cpu: NotRequired[CpuShare]
    verified: NotRequired[VerifiedResult]


CHAT_FILE = "chat.json"  # of a run directory


def write_date(run: Path, date: datetime) -> None:
    """Write the date of a run, to the second, without a time zone."""
    text = date.replace(tzinfo=None).isoformat(timespec="seconds")
    write_atomically(run / CHAT_FILE, json.dumps({"date": text}) + "\n")


def read_date(run: Path) -> datetime | None:
    """Return the date of a run; None for one of an older version. Raises CheckpointError for a
    damaged file."""
    file = run / CHAT_FILE
    try:
        return datetime.fromisoformat(json.loads(file.read_bytes())["date"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} has no date ({error!r}); restore it from a copy, or write the day on which "
            'the run began: {"date": "2026-07-26T00:00:00"}'
        ) from error


def share_name(measured: Mapping[str, Any]) -> str:
    """Return what an arm's share of right answers is: the agreement with the teacher where no
    answers are known, else the accuracy."""
    return "agreement" if "agreement" in measured and "f1" not in measured else "accuracy"
