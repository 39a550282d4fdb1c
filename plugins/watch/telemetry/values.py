"""Name the numbers that all telemetry sinks show, each in one way."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cartridge_forge.protocols.records.run_files import MetricRow


def losses(row: MetricRow) -> dict[str, float]:
    """Return channel -> its loss in the step, without channels that had no data. A run without
    episodes has doc_kl alone."""
    if not row.channels:
        return {} if row.kl is None else {"doc_kl": row.kl}
    return {name: facts["value"] for name, facts in row.channels.items() if facts["count"]}


def row_values(row: MetricRow) -> dict[str, float]:
    """Return a step's deterministic values: `{"loss/doc_kl": 0.431, "optimizer/grad_norm": 0.87,
    ...}`.

    With episodes, every fact of the row is added: "grpo/ratio", "cosine/doc_kl/grpo",
    "episodes/reward".
    """
    values = {f"loss/{channel}": loss for channel, loss in losses(row).items()}
    for channel, facts in row.channels.items():
        values |= {f"{channel}/{name}": fact for name, fact in facts.items() if name != "value"}
    values |= {f"cosine/{pair}": cosine for pair, cosine in row.cosines.items()}
    values |= {f"episodes/{name}": count for name, count in row.episodes.items()}
    values |= {f"sampler_gap/{name}": value for name, value in row.sampler_gap.items()}
    values |= {f"verified/{name}": value for name, value in row.verified.items()}
    values |= {
        "optimizer/grad_norm": row.grad_norm,
        "optimizer/learning_rate": row.lr,
        "tokens/trained": row.tokens,
        "tokens/stale": row.stale_tokens,
    }
    if row.accuracy is not None:
        values["accuracy/probe"] = row.accuracy
    return values


def step_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return a step's measured `{"seconds/rollout": 0.14, "tokens_per_second": 978.3, ...}`."""
    values = {f"seconds/{phase}": seconds for phase, seconds in event["seconds"].items()}
    if "tokens_per_second" in event:
        values["tokens_per_second"] = event["tokens_per_second"]
    values |= {f"bytes/{kind}": count for kind, count in event.get("bytes", {}).items()}
    spent = event.get("teachers", {}).get("dollars", {})
    values |= {f"dollars/{teacher}": dollars for teacher, dollars in spent.items()}
    return values


def evaluated_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Return `{"accuracy/greedy": 0.85, "accuracy/sampled": 0.64}`, as far as measured."""
    values = {"accuracy/greedy": event["accuracy"]}
    if event.get("sampled") is not None:
        values["accuracy/sampled"] = event["sampled"]["accuracy"]
    return values


def role_of(lane: str) -> str:
    """Return the role of a replica's name: `role_of("generator[1]") == "generator"`."""
    return lane.partition("[")[0]


def epoch_seconds(event: Mapping[str, Any]) -> float:
    """Return the time of an event of events.jsonl, in seconds since the epoch."""
    return datetime.fromisoformat(event["time"]).timestamp()
