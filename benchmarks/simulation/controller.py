"""From 1 to 1,000 hosts: what one controller and the links between hosts would bear, simulated.

    python -m benchmarks.simulation.controller [meshes/longhealth_3b.yaml] [--set KEY=VALUE]...
        [--replicas 8] [--gbit 10]

`benchmarks.simulation.mesh` simulates the queues. Costs are those that
benchmarks.simulation.controller_latency measured, and those of a publish over links of `--gbit`
Gbit/s that benchmarks.publish_hosts measured; model times are the plan's roofline of one step on
A100s. A row that is called a plan has what Cartridge Forge does not have.

Every host has `--replicas` generators and gets as many prompts as the mesh file gives each of its
own, so a step's model time stays as it is: teachers and trainer are taken to grow along, which they
do not yet, and `one trainer` says what the one there is would take.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from benchmarks.record import ROOT, benchmark, read
from benchmarks.simulation.mesh import (
    MeasuredCosts,
    MeshScale,
    MessageCost,
    StepOutcome,
    simulate,
)
from cartridge_forge.forge_run.plan.plan import step_workload
from cartridge_forge.forge_run.plan.roofline import A100
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.statistics.formatting import bytes_text, seconds_text
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.mesh import RunSpec
from studies import archive
from studies.tables.cells import table
from studies.tables.recorded import limits as limits_table
from studies.tables.recorded import simulated

MOST_HOSTS = 1000
LOOP_LIMIT = 0.5  # of the loop: beyond it waiting times grow fast
SHARE_LIMIT = 0.1  # of the step's model time


def breaks_at(broken: Callable[[int], bool], most: int) -> int | None:
    """Return the fewest hosts, up to `most`, at which a limit is broken; None where it holds. A
    broken limit stays broken with more hosts."""
    return 1 + bisect_left(range(1, most + 1), True, key=broken) if broken(most) else None


# Each limit of a mesh, and whether an outcome breaks it.
LIMITS: Mapping[str, Callable[[MeshScale, StepOutcome, RunSpec], bool]] = {
    "publish over 10%": lambda s, o, _: o.publish > SHARE_LIMIT * s.compute,
    "requests over 10%": lambda s, o, _: o.dispatch > SHARE_LIMIT * s.compute,
    "Monarch over 50%": lambda s, o, _: o.wire_share > LOOP_LIMIT,
    "loop over 50%": lambda s, o, _: o.loop_share > LOOP_LIMIT,
    "healthy are suspected": lambda s, o, m: o.silence > suspected(s, m),
    "start over spawn_timeout_s": lambda s, o, m: o.start > m.mesh.spawn_timeout_s,
    "too late to judge": lambda s, o, _: o.late_passes > 0.5,
}
REMEDIES: Mapping[str, Mapping[str, Any]] = {
    "as it is": {},
    "publish: direct": {"relays": False},
    "a heartbeat of each process": {"beat_per_host": False},
    "heartbeat 5 s, suspicion 20 s": {"heartbeat_s": 5.0},
    "plan: kept seats": {"kept_seats": True},
    "plan: 8 controllers": {"controllers": 8},
    "plan: both together": {"kept_seats": True, "controllers": 8},
}


def suspected(scale: MeshScale, spec: RunSpec) -> float:
    """Return the seconds of silence that make a replica SUSPECT; they grow with the heartbeat."""
    health = spec.mesh.health
    return health.suspect_after_s * scale.heartbeat_s / health.heartbeat_s


def relays_from(measured: Mapping[str, Any], gbit: float) -> tuple[float, float]:
    """Return seconds a byte of a relayed publish over two hosts, and seconds for each further host:
    the mean from the fewest hosts that were measured to the most, at links of this rate. Raises
    SpecError for a rate that was not measured."""
    rows = [r for r in measured["rows"] if (r["publish"], r["gbit"]) == ("relayed", gbit)]
    if not rows:
        rates = sorted({r["gbit"] for r in measured["rows"]})
        raise SpecError(f"--gbit {gbit:g} was not measured; choose one of {rates}")
    few, most = (pick(rows, key=lambda r: r["hosts"]) for pick in (min, max))
    further = (most["seconds"] - few["seconds"]) / max(1, most["hosts"] - few["hosts"])
    return few["seconds"] / few["bytes"], max(0.0, further)


def costs_from(
    measured: Mapping[str, Any], publishes: Mapping[str, Any], gbit: float = 10.0
) -> MeasuredCosts:
    """Return the costs measured with the most replicas, and those of relays at this rate."""
    last = {name: rows[-1] for name, rows in measured.items() if isinstance(rows, list)}

    def message(name: str) -> MessageCost:
        return MessageCost(last[name]["send_s"], last[name]["receive_s"])

    first_call, most, look = measured["calls"][0], last["calls"], last["looks"]
    small, large = measured["store"][0], last["store"]
    relay_byte, relay_host = relays_from(publishes, gbit)
    of_four = (large["get_4_s"] - small["get_4_s"]) / (large["bytes"] - small["bytes"]) / 4
    return MeasuredCosts(
        beat=message("beats"),
        request=message("routes"),
        update=message("updates"),
        tick=measured["idle_s"],
        look=look["settled_s"] / look["replicas"],
        seat=last["seats"]["loop_s"] / last["seats"]["replicas"],
        status=look["status_s"] / look["replicas"],
        event=measured["records"]["event_s"],
        span=measured["records"]["span_s"],
        wire=max(0.0, most["process_s"] - most["send_s"] - most["receive_s"]),
        trip=max(0.0, first_call["wall_s"] - first_call["send_s"] - first_call["receive_s"]),
        start=last["starts"]["loop_s"] / last["starts"]["processes"],
        start_host=last["starts"]["wall_s"] / last["starts"]["processes"],
        store_fixed=small["get_4_s"] / 4,
        store_byte=of_four,
        relay_byte=relay_byte,
        relay_host=relay_host,
    )


def scale_of(spec: RunSpec, replicas: int) -> MeshScale:
    """Return one host of this mesh. Raises SpecError where the plan has no roofline for it."""
    phases = {low.name: low for low, _ in step_workload(spec)}
    if not phases:
        raise SpecError(
            f"{spec.mesh.name} has no roofline to take a step's model time from; choose a mesh of "
            "document distillation whose model's shape and data.document_tokens are known"
        )
    return MeshScale(
        hosts=1,
        replicas=replicas,
        rollout=phases["rollout"].seconds(A100),
        score=phases["teacher"].seconds(A100),
        train=phases["student"].seconds(A100),
        published=round(phases["publish"].bytes) // 2,  # out of the trainer, and into a reader
        heartbeat_s=spec.mesh.health.heartbeat_s,
    )


def limits(
    spec: RunSpec, scale: MeshScale, costs: MeasuredCosts, most: int = MOST_HOSTS
) -> dict[str, Any]:
    """Return the fewest hosts at which each limit breaks, by remedy; None where it holds."""
    outcome = cache(lambda grown: simulate(grown, costs))

    def first(limit: str, remedy: Mapping[str, Any]) -> int | None:
        def broken(hosts: int) -> bool:
            grown = replace(scale, hosts=hosts, **remedy)
            result = outcome(grown)
            # Where no step ends, every limit is broken.
            return not math.isfinite(result.step) or LIMITS[limit](grown, result, spec)

        return breaks_at(broken, most)

    return {
        name: {limit: first(limit, remedy) for limit in LIMITS} for name, remedy in REMEDIES.items()
    }


def checks(measured: Mapping[str, Any], measured_costs: MeasuredCosts) -> list[dict[str, float]]:
    """Return ratios of simulated to measured times, of a real service on one machine; 1 is exact.
    There replicas and controller share the cores: a message costs all of them `wall_s`."""
    calls = measured["calls"][-1]
    costs = replace(measured_costs, wire=calls["wall_s"] / calls["replicas"], span=0.0)
    # An update without a store costs its messages alone.
    still = replace(costs, store_fixed=0.0, store_byte=0.0, relay_byte=0.0, relay_host=0.0)
    rows = []
    for real in measured["checks"]:
        n, beat = real["replicas"], real["heartbeat_s"]
        of_one = {"score": 0, "train": 0, "published": 0, "beat_per_host": False}
        idle = MeshScale(n, 1, rollout=4.0, heartbeat_s=beat, **of_one)
        quiet = replace(idle, rollout=0.0, heartbeat_s=1e6)
        result = simulate(quiet, still, steps=1)
        update = result.publish - simulate(replace(quiet, hosts=1), still, 1).publish / 2
        rows.append(
            {
                "replicas": n,
                "loop": simulate(idle, costs, steps=1).loop_share / real["loop_share"],
                "split": result.dispatch / real["split_s"],
                "update": update / real["update_s"],
            }
        )
    return rows


def measured_costs(name: str) -> dict[str, Any]:
    """Return the record of a benchmark that ran here, or else the published one."""
    measured = ROOT / "runs" / "bench" / f"{name}.json"
    if measured.is_file():
        return read(measured)
    published: dict[str, Any] = archive.document("scaling", f"{name}.json")
    return published


def measure(options: argparse.Namespace) -> tuple[dict[str, float], dict[str, Any]]:
    """Return a step from 1 to MOST_HOSTS hosts, and where each limit breaks."""
    origin, publishes = measured_costs("controller_latency"), measured_costs("publish_hosts")
    spec = load_spec(options.mesh, sets=options.set).spec
    scale = scale_of(spec, options.replicas)
    costs = costs_from(origin["results"], publishes["results"], options.gbit)
    doubling = [1 << i for i in range(MOST_HOSTS.bit_length())]
    grown = [replace(scale, hosts=hosts) for hosts in (*doubling, MOST_HOSTS)]
    outcomes = [simulate(scale_grown, costs) for scale_grown in grown]
    broken, ratios = limits(spec, scale, costs), checks(origin["results"], costs)
    for record in (origin, publishes):
        print(f"costs: {record['benchmark']}, {record['device']['name']}, {record['commit'][:12]}")
    print(
        f"a publish: {bytes_text(1 / costs.relay_byte)}/s over two hosts with links of "
        f"{options.gbit:g} Gbit/s, {seconds_text(costs.relay_host)} more for each further host\n"
        f"{scale.replicas} generators a host; model time {seconds_text(scale.compute)} a step; "
        f"{bytes_text(scale.published)} published to each\n"
    )
    print("simulated over measured, one machine:")
    for row in ratios:
        print("  " + ", ".join(f"{name} {value:.2f}" for name, value in row.items()))
    rows = [
        {"hosts": at.hosts, "replicas": at.readers, **asdict(outcome)}
        | {"overhead": 1 - at.compute / outcome.step, "one_trainer": at.hosts * at.train}
        for at, outcome in zip(grown, outcomes, strict=True)
    ]
    return {}, {"rows": rows, "breaks_at": broken, "checks": ratios}


if __name__ == "__main__":
    record = benchmark(
        __doc__,
        measure,
        {
            "mesh": {"nargs": "?", "default": "meshes/longhealth_3b.yaml"},
            "--set": {"action": "append", "default": [], "metavar": "KEY=VALUE"},
            "--replicas": (8, "generators a host"),
            "--gbit": (10.0, "rate of the measured links that publishes are taken from"),
        },
    )
    for heads, cells in (simulated(record["results"]), limits_table(record["results"])):
        print("\n" + "\n".join(table(heads, cells)))
