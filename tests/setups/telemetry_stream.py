"""What the sinks are told over a short life of a run: made up, but whole and with known sums.

`tell(sink, now)` plays two arms of four steps with two generators, one doc teacher and a trainer,
one of the generators dying and coming back. Times are seconds since the epoch, from `now`.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from cartridge_forge.protocols.files import utc_text
from cartridge_forge.protocols.ports import TelemetrySink, TraceSpan
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.protocols.records.status import (
    PoolStatus,
    ReplicaState,
    ReplicaStatus,
    RunStatus,
)

STEPS = 4
SECONDS = {"rollout": 0.2, "score": 0.1, "train": 0.3, "publish": 0.02, "orchestration": 0.03}
STEP = 0.62  # the four phases in turn; orchestration is inside them
BYTES = {"scores": 4096, "cartridges": 65536}
DOCUMENTS = {"hits": 5, "host_hits": 1, "misses": 2, "evictions": 3}
HIDDEN = 0.0625
MEMORY = 256 * 2**20


def event(name: str, at: float, **facts: Any) -> dict[str, Any]:
    """A record as events.jsonl has it."""
    return {"time": utc_text(datetime.fromtimestamp(at, UTC)), "event": name, **facts}


def replica(name: str, version: int = -1, **changes: Any) -> ReplicaStatus:
    facts: dict[str, Any] = {
        "state": ReplicaState.HEALTHY, "host": "localhost", "pid": 4711, "ongoing": 1,
        "memory_bytes": MEMORY,
    }  # fmt: skip
    return ReplicaStatus(name=name, version=version, **{**facts, **changes})


def status(arm: str = "on_policy", step: int = 3, served: int = 40) -> RunStatus:
    """Two generators, of which one is dead and was two versions behind; `served` requests."""
    dead = {"state": ReplicaState.DEAD, "pid": 0, "ongoing": 0, "memory_bytes": 0}
    generators = (replica("generator[0]", step), replica("generator[1]", step - 2, **dead))
    pools = (
        PoolStatus("generator", 2, 3, generators, served, 2, 5, 1),
        PoolStatus("doc_teacher", 1, 0, (replica("doc_teacher[0]"),), 8, 0, 0, 0),
        PoolStatus("trainer", 1, 0, (replica("trainer[0]"),), 12, 0, 0, 0),
    )
    return RunStatus(
        stage=f"training {arm}", arm=arm, step=step, steps=STEPS, version=step, kl=0.4, pools=pools
    )


def row(arm: str, step: int) -> MetricRow:
    """On policy with episodes: gradients are compared in the first step alone, and nothing was
    preferred in the last."""
    kl = 2.0 / step
    channels: dict[str, dict[str, float]] = {
        "doc_kl": {"value": kl, "count": 100 + step, "weight": 0.2},
        "grpo": {"value": -0.25 * step, "count": 64, "weight": 1.0, "clipped": 0.125},
        "sdpo": {"value": 0.1, "count": 12, "weight": 0.5, "gradient_removed": 0.25},
        "replay_dpo": {"value": 0.5, "count": 3, "weight": 0.5},
    }
    if step == 1:
        channels["grpo"]["grad_norm"] = 0.375
    if step == STEPS:
        channels["replay_dpo"] |= {"value": 0.0, "count": 0}
    episodes = {
        "count": 8, "errored": 1, "turns": 20, "reward": 0.25, "flag/copied": 2,
        "teachers/pair": 2, "teachers/tie": 1, "teachers/trained": 2,
    }  # fmt: skip
    with_episodes: dict[str, Any] = {}
    if arm == "on_policy":
        with_episodes = {"channels": channels, "episodes": episodes}
    return MetricRow(
        arm=arm, step=step, version=step, kl=kl, grad_norm=0.5 + step, lr=0.02,
        tokens=100 + step, stale_tokens=0, accuracy=0.75 if step == STEPS else None,
        sampler_gap={"mean": 1e-7, "signed": -1e-8, "max": 1e-5, "tokens": 100.0},
        **with_episodes,
    )  # fmt: skip


def teachers(step: int) -> dict[str, Any]:
    """What a "step" event tells of the teachers: counts since the run began."""
    return {
        "calls": {"opus": {"answered": 3 * step, "http_500": 1}, "gpt": {"unusable": 1}},
        "dollars": {"opus": 0.5 * step, "gpt": 0.125},
    }


def tell(sink: TelemetrySink, now: float, served: int = 40) -> float:
    """Play the run to the sink; returns when it ended."""
    sink.event(event("run_started", now, resumed=False, mesh="small"))
    for role, replicas in (("generator", 2), ("doc_teacher", 1), ("trainer", 1)):
        sink.event(event("role_ready", now, role=role, replicas=replicas, pids=[1], seconds=0.1))
    for arm in ("on_policy", "offline"):
        for step in range(1, STEPS + 1):
            for span in step_spans(arm, step, now):
                sink.span(span)
            now += STEP
            sink.metric(row(arm, step))
            seconds = {**SECONDS, "step": STEP}
            heard = {"teachers": teachers(step)} if arm == "on_policy" else {}
            sink.event(
                event("step", now, arm=arm, step=step, seconds=seconds, rollouts=6,
                      tokens_per_second=round((100 + step) / STEP, 1), bytes=BYTES,
                      hidden=HIDDEN, documents=DOCUMENTS, **heard)
            )  # fmt: skip
            sink.status(status(arm, step, served))
        sink.event(event("checkpoint", now, arm=arm, step=STEPS, file=f"{arm}-4"))
        sampled = {"accuracy": 0.5, "ci95": [0.3, 0.7], "n": 8, "parse_failures": 1}
        sink.event(
            event("evaluated", now, arm=arm, accuracy=0.875, ci95=[0.5, 0.98], n=8,
                  parse_failures=0, sampled=sampled)
        )  # fmt: skip
    sink.event(event("replica_lost", now, role="generator", replica="generator[1]", reason="kill"))
    now += 1.5
    sink.event(
        event("replica_back", now, role="generator", replica="generator[1]", seconds=1.5, pid=99)
    )
    return now


def step_spans(arm: str, step: int, begun: float) -> Iterator[TraceSpan]:
    """One step: both generators sample, the second request of generator[0] waits for its first."""
    phases = {"arm": arm, "step": step, "version": step - 1}

    def request(
        lane: str, name: str, number: int, begin: float, end: float, waited: float
    ) -> TraceSpan:
        facts = {
            "request": f"{lane.partition('[')[0]}/{step}/{number}", **phases, "waited": waited,
            "attempt": 1, "outcome": "ok",
        }  # fmt: skip
        return TraceSpan(lane, name, begun + begin, begun + end, facts)

    yield request("generator[0]", "generate", 0, 0.001, 0.101, 0.0)
    yield request("generator[1]", "generate", 1, 0.001, 0.181, 0.0)
    yield request("generator[0]", "generate", 2, 0.101, 0.199, 0.1)
    yield TraceSpan("controller", "rollout", begun, begun + 0.2, phases)
    yield request("doc_teacher[0]", "score", 0, 0.201, 0.299, 0.0)
    yield TraceSpan("controller", "score", begun + 0.2, begun + 0.3, phases)
    yield request("trainer[0]", "step", 0, 0.301, 0.599, 0.0)
    yield TraceSpan("controller", "train", begun + 0.3, begun + 0.6, phases)
    yield TraceSpan("controller", "publish", begun + 0.6, begun + 0.62, phases)
