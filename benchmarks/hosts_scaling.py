"""From 1 to 1,000 hosts: what one controller and one tensor store would bear, simulated.

    python -m benchmarks.hosts_scaling [meshes/longhealth_3b.yaml] [--set KEY=VALUE]...
        [--replicas 8] [--byte-rate 3e9] [--latencies benchmarks/controller_latency.json]

The queue is cluster/schedule.py; its costs are those that benchmarks.controller_latency measured;
model times are the plan's roofline of one step on A100s. Every host has `--replicas` generators and
gets as many prompts as the mesh file gives each of its own, so a step's model time stays as it is:
teachers and trainer are taken to grow along, which they do not yet, and `one trainer` says what the
one there is would take. `--byte-rate` puts the store on a faster link than was measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from cluster.schedule import (
    Costs,
    Message,
    Outcome,
    Scale,
    breaks_at,
    doubling,
    simulate,
)
from forge_run.figures import bytes_text, seconds_text
from forge_run.plan.plan import step_workload
from forge_run.plan.roofline import A100
from protocols.errors import SpecError
from protocols.spec import RunSpec
from protocols.spec_loading import load_spec

MESH = "meshes/longhealth_3b.yaml"
LATENCIES = Path(__file__).with_name("controller_latency.json")
MOST_HOSTS = 1000
LOOP_LIMIT = 0.5  # of the loop: beyond it what waits for it grows fast
SHARE_LIMIT = 0.1  # of the step's model time


@dataclass(frozen=True)
class Limit:
    """Something that a mesh may outgrow: what, and whether an outcome has."""

    name: str
    broken: Callable[[Scale, Outcome, RunSpec], bool]


LIMITS = (
    Limit("publish > 10%", lambda s, o, _: o.publish > SHARE_LIMIT * s.compute),
    Limit("requests > 10%", lambda s, o, _: o.dispatch > SHARE_LIMIT * s.compute),
    Limit("Monarch > 50%", lambda s, o, _: o.wire_share > LOOP_LIMIT),
    Limit("loop > 50%", lambda s, o, _: o.loop_share > LOOP_LIMIT),
    Limit("healthy are suspected", lambda s, o, m: o.silence > suspected(s, m)),
    Limit("start > spawn_timeout_s", lambda s, o, m: o.start > m.mesh.spawn_timeout_s),
    Limit("too late to judge", lambda s, o, _: o.late_passes > 0.5),
)


def suspected(scale: Scale, spec: RunSpec) -> float:
    """Silence that is doubted, seconds: it is raised with the heartbeat."""
    health = spec.mesh.health
    return health.suspect_after_s * scale.heartbeat_s / health.heartbeat_s


REMEDIES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "4 stores": {"stores": 4},
    "one get a host": {"get_per_host": True},
    "hosts pass it on": {"relays": True},
    "kept seats": {"kept_seats": True},
    "heartbeat 5 s, suspicion 20 s": {"heartbeat_s": 5.0},
    "one beat a host": {"beat_per_host": True},
    "8 controllers": {"controllers": 8},
    "passed on, kept seats, one beat a host": {
        "relays": True, "kept_seats": True, "beat_per_host": True,
    },
    "all of it": {
        "relays": True, "kept_seats": True, "beat_per_host": True, "controllers": 8,
    },
}  # fmt: skip


def costs_from(measured: Mapping[str, Any], byte_rate: float | None = None) -> Costs:
    """Measured latencies as the simulation's costs: those of the most replicas measured."""

    def message(name: str) -> Message:
        row = measured[name][-1]
        return Message(row["send_s"], row["receive_s"])

    alone, most = measured["calls"][0], measured["calls"][-1]
    starts = measured["starts"][-1]
    seat, look = measured["seats"][-1], measured["looks"][-1]
    small, large = measured["store"][0], measured["store"][-1]
    of_four = (large["get_4_s"] - small["get_4_s"]) / (large["bytes"] - small["bytes"]) / 4
    return Costs(
        beat=message("beats"),
        request=message("routes"),
        update=message("updates"),
        tick=measured["idle_s"],
        look=look["settled_s"] / look["replicas"],
        seat=seat["loop_s"] / seat["replicas"],
        status=look["status_s"] / look["replicas"],
        event=measured["records"]["event_s"],
        span=measured["records"]["span_s"],
        wire=max(0.0, most["process_s"] - most["send_s"] - most["receive_s"]),
        trip=max(0.0, alone["wall_s"] - alone["send_s"] - alone["receive_s"]),
        start=starts["loop_s"] / starts["processes"],
        start_host=starts["wall_s"] / starts["processes"],
        store_fixed=small["get_4_s"] / 4,
        store_byte=of_four if byte_rate is None else 1 / byte_rate,
    )


def scale_of(spec: RunSpec, replicas: int) -> Scale:
    """One host of this mesh. Raises SpecError where the plan has no roofline for it."""
    phases = {low.name: low for low, _ in step_workload(spec)}
    if not phases:
        raise SpecError(
            f"{spec.mesh.name} has no roofline to take a step's model time from; choose a mesh of "
            "document distillation whose model's shape and data.document_tokens are known"
        )
    return Scale(
        hosts=1,
        replicas=replicas,
        rollout=phases["rollout"].seconds(A100),
        score=phases["teacher"].seconds(A100),
        train=phases["student"].seconds(A100),
        published=round(phases["publish"].bytes),
        heartbeat_s=spec.mesh.health.heartbeat_s,
    )


def table(scale: Scale, costs: Costs, most: int = MOST_HOSTS) -> list[dict[str, Any]]:
    """One row for 1, 2, 4, ... hosts."""
    rows = []
    for hosts in doubling(most):
        grown = replace(scale, hosts=hosts)
        outcome = simulate(grown, costs)
        rows.append(
            {
                "hosts": hosts,
                "replicas": grown.readers,
                "step_s": outcome.step,
                "overhead": outcome.overhead(grown),
                "publish_s": outcome.publish,
                "store": outcome.store_share,
                "loop": outcome.loop_share,
                "wire": outcome.wire_share,
                "silence_s": outcome.silence,
                "requests_s": outcome.dispatch,
                "late": outcome.late_passes,
                "start_s": outcome.start,
                "one_trainer_s": hosts * scale.train,
            }
        )
    return rows


def limits(spec: RunSpec, scale: Scale, costs: Costs, most: int = MOST_HOSTS) -> dict[str, Any]:
    """The fewest hosts at which each limit breaks, for every remedy; None where it holds."""

    outcome = cache(lambda grown: simulate(grown, costs))

    def first(limit: Limit, remedy: Mapping[str, Any]) -> int | None:
        def broken(hosts: int) -> bool:
            grown = replace(scale, hosts=hosts, **remedy)
            found = outcome(grown)
            # Beyond the last step that ends, every limit is.
            return not math.isfinite(found.step) or limit.broken(grown, found, spec)

        return breaks_at(broken, most)

    return {
        name: {limit.name: first(limit, remedy) for limit in LIMITS}
        for name, remedy in REMEDIES.items()
    }


def checks(measured: Mapping[str, Any]) -> list[dict[str, float]]:
    """Simulated over measured, of a real service on one machine: the ratio is 1 where it is right.

    There replicas and controller share the cores: a message costs all of them `wall_s`.
    """
    calls = measured["calls"][-1]
    costs = replace(costs_from(measured), wire=calls["wall_s"] / calls["replicas"], span=0.0)
    rows = []
    for row in measured["checks"]:
        n, beat = row["replicas"], row["heartbeat_s"]
        idle = Scale(n, 1, rollout=4.0, score=0, train=0, published=0, heartbeat_s=beat)
        asked = replace(idle, rollout=0.0)
        # An update without a store: what it costs is the messages.
        still = replace(costs, store_fixed=0.0, store_byte=0.0)
        quiet = replace(asked, heartbeat_s=1e6)
        done = simulate(quiet, still, steps=1)
        update = done.publish - simulate(replace(quiet, hosts=1), still, 1).publish / 2
        rows.append(
            {
                "replicas": n,
                "loop": simulate(idle, costs, steps=1).loop_share / row["loop_share"],
                "split": done.dispatch / row["split_s"],
                "update": update / row["update_s"],
            }
        )
    return rows


def text(
    scale: Scale, rows: Sequence[Mapping[str, Any]], broken: Mapping[str, Mapping[str, Any]]
) -> str:
    """The figures as Markdown tables."""
    each = bytes_text(scale.published)
    lines = [
        f"{scale.replicas} generators a host; model time {seconds_text(scale.compute)} a step; "
        f"{each} published to each",
        "",
        "| hosts | step | overhead | publish | requests | store | loop | Monarch | silence |"
        " start | one trainer |",
        "|" + "---|" * 11,
    ]
    for r in rows:
        cells = (
            f"{r['hosts']:,}", _shown(r["step_s"]), f"{r['overhead']:.0%}",
            _shown(r["publish_s"]), _shown(r["requests_s"]), f"{r['store']:.0%}",
            f"{r['loop']:.1%}", f"{r['wire']:.0%}", _shown(r["silence_s"]),
            seconds_text(r["start_s"]), seconds_text(r["one_trainer_s"]),
        )  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    names = [limit.name for limit in LIMITS]
    lines += [
        "",
        "| breaks at hosts | " + " | ".join(names) + " |",
        "|" + "---|" * (1 + len(names)),
    ]
    for remedy, at in broken.items():
        shown = ("holds" if at[name] is None else f"{at[name]:,}" for name in names)
        lines.append(f"| {remedy} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def _shown(seconds: float) -> str:
    return seconds_text(seconds) if math.isfinite(seconds) else "never"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mesh", nargs="?", default=MESH)
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--replicas", type=int, default=8, help="generators a host")
    parser.add_argument(
        "--byte-rate", type=float, help="bytes/s of the store, in place of measured"
    )
    parser.add_argument("--latencies", type=Path, default=LATENCIES)
    parser.add_argument("--out", type=Path, help="the same figures as JSON")
    arguments = parser.parse_args()
    measured = json.loads(arguments.latencies.read_bytes())
    spec = load_spec(arguments.mesh, sets=arguments.sets).spec
    scale, costs = scale_of(spec, arguments.replicas), costs_from(measured, arguments.byte_rate)
    rows, broken, ratios = table(scale, costs), limits(spec, scale, costs), checks(measured)
    print(f"costs: {arguments.latencies.name}, {measured['device']}, {measured['commit'][:12]}")
    print(text(scale, rows, broken))
    print("\nsimulated over measured, one machine:")
    for row in ratios:
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()))
    if arguments.out:
        found = {"rows": rows, "breaks_at": broken, "checks": ratios}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
