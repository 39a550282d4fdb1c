"""How much faster episodes train that run ahead, where the environment is slow by chance.

    python -m benchmarks.simulation.ahead [--steps 14] [--median 0.2] [--sigma 1.0] [--quick]

A server of the clinic desk holds every reply back for a lognormal time. The same run trains over it
in strict mode and with rollouts ahead; both in turn, on this machine. Steps while rollouts build up
are left out. The figure is trained tokens a second, ahead over strict.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from benchmarks.orchestration import ARM, finished_run
from benchmarks.record import benchmark
from environments.openenv.server import desk_app
from protocols.files import iter_rows
from teachers.fake_provider.server import LoopbackServer

GOAL = 1.6
MESH = "meshes/three_channels.yaml"
SETS = ("objective.beta=0", "replay=null", "objective.alpha=0", "objective.w_doc=0")


def slow(app: ASGIApp, median: float, sigma: float) -> ASGIApp:
    """Return the application with every WebSocket reply late by a lognormal time (seconds)."""
    draws = random.Random("benchmarks.simulation.ahead")

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        async def wait_and_send(message: Message) -> None:
            if message["type"] == "websocket.send":
                await asyncio.sleep(median * draws.lognormvariate(0.0, sigma))
            await send(message)

        await app(scope, receive, wait_and_send)

    return late


def trained(asked: argparse.Namespace, staleness: int, url: str) -> dict[str, float]:
    """Return medians of a run's steps, without those while rollouts build up."""
    sets = (
        *SETS, f"train.staleness={staleness}",
        f"episodes.environment={{kind: openenv, url: '{url}', timeout_s: 120}}",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        run = finished_run(MESH, asked.steps, sets, directory, limit_s=asked.limit)
        events = [e for e in iter_rows(run / "events.jsonl") if e["event"] == "step"]
        rows = [row for row in iter_rows(run / "metrics.jsonl") if row["arm"] == ARM]
        accuracy = json.loads((run / "results.json").read_text())["arms"][ARM]["accuracy"]
    whole = [e["seconds"] | {"tokens": r["tokens"]} for e, r in zip(events, rows, strict=True)]
    steps = whole[1 + asked.staleness :]
    seconds = sum(s["step"] for s in steps)
    return {
        "tokens_per_second": sum(s["tokens"] for s in steps) / seconds,
        "step": seconds / len(steps),
        "rollout": statistics.mean(s["rollout"] for s in steps),
        "orchestration_share": sum(s["orchestration"] for s in steps) / seconds,
        "dropped_groups": sum(r["episodes"].get("ahead/dropped", 0) for r in rows),
        "stale_tokens": sum(r["stale_tokens"] for r in rows),
        "tokens": sum(r["tokens"] for r in rows),
        "accuracy": accuracy,
    }


def measure(asked: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return the ratio of trained tokens a second, and both runs' figures."""
    found = {}
    for staleness in (0, asked.staleness):
        server = LoopbackServer(
            slow(desk_app(), asked.median, asked.sigma), "slow environment", ws="websockets-sansio"
        )
        with server:
            one = found[f"staleness {staleness}"] = trained(asked, staleness, server.url)
        print(
            f"staleness {staleness}: {one['tokens_per_second']:.0f} trained tokens/s, a step "
            f"{one['step']:.2f} s ({one['rollout']:.2f} s waited for rollouts), "
            f"{one['stale_tokens']:.0f} of {one['tokens']:.0f} tokens of an older version, "
            f"{one['dropped_groups']:.0f} groups dropped"
        )
    strict, ahead = (found[f"staleness {s}"] for s in (0, asked.staleness))
    ratio = ahead["tokens_per_second"] / strict["tokens_per_second"]
    print(f"{ratio:.2f}x; goal {GOAL}x: {'met' if ratio >= GOAL else 'MISSED'}")
    return {"ahead over strict": ratio}, found


if __name__ == "__main__":
    benchmark(
        __doc__,
        measure,
        {
            "--steps": 14,
            "--median": 0.2,
            "--sigma": 1.0,
            "--staleness": 2,
            "--limit": 900.0,
        },
        quick={"steps": 6},
    )
