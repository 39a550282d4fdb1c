"""Test the simulated controller, and the phases of a step."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gpu.phase_step import PHASES, SETTINGS, PhaseStep, Setting
from benchmarks.simulation.controller import breaks_at, checks, costs_from, relays_from, suspected
from benchmarks.simulation.mesh import (
    EventQueue,
    MeasuredCosts,
    MeshScale,
    MessageCost,
    SerialServer,
    Task,
    grouped,
    putting,
    reading,
    simulate,
)
from benchmarks.step_gpu import measure, measured, published_bound
from cartridge_forge.forge_run.plan.roofline import DevicePeaks, Workload
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.spec.model import ShapeSpec
from cartridge_forge.protocols.step import TensorRef
from cartridge_forge.services.planes.codec import pack, unpack
from studies import archive

NOTHING = MeasuredCosts()


def published(name: str) -> Any:
    return archive.document("scaling", f"{name}.json")["results"]


def measured_costs() -> MeasuredCosts:
    return costs_from(published("controller_latency"), published("publish_hosts"))


IDLE = MeshScale(hosts=1, replicas=1, rollout=10.0, score=0.0, train=0.0, published=0)


def test_one_server_takes_as_much_of_the_time_as_rate_times_cost() -> None:
    # 8 replicas, a beat of 2 + 1 ms each every 0.5 s: the loop works 24 ms of every 516: a pass
    # begins 0.5 s after the one before has sent its beats.
    costs = replace(NOTHING, beat=MessageCost(0.002, 0.001))
    outcome = simulate(replace(IDLE, replicas=8, rollout=100.0), costs)
    assert outcome.loop_share == pytest.approx(8 * 0.003 / 0.5, rel=0.05)
    assert outcome.late_passes == 0


def test_a_fan_out_of_n_messages_of_cost_c_ends_after_n_c_and_the_way() -> None:
    costs = replace(NOTHING, request=MessageCost(0.01, 0.0), trip=0.3)
    still = replace(IDLE, rollout=0.0, heartbeat_s=1e9)
    for replicas in (1, 5, 16):
        outcome = simulate(replace(still, replicas=replicas), costs)
        assert outcome.dispatch == pytest.approx(replicas * 0.01 + 0.3)
    # The last answer alone is waited for, while all are sent before the first comes back.
    heard = replace(costs, request=MessageCost(0.01, 0.01))
    assert simulate(replace(still, replicas=5), heard).dispatch == pytest.approx(5 * 0.01 + 0.31)
    # The loop hears no answer before it has sent what was there to be sent.
    assert simulate(replace(still, replicas=64), heard).dispatch == pytest.approx(0.64 + 0.64)


def test_a_seat_is_looked_for_among_all() -> None:
    costs = replace(NOTHING, seat=0.001)
    still = replace(IDLE, heartbeat_s=1e9, replicas=20)
    assert simulate(still, costs).dispatch == pytest.approx(20 * 20 * 0.001)
    assert simulate(replace(still, kept_seats=True), costs).dispatch == pytest.approx(0.0)


def test_a_server_does_one_thing_at_a_time_in_the_order_of_arrival() -> None:
    events, server, ends = EventQueue(), SerialServer(), {}

    def task(name: str, after: float, seconds: float) -> Task:
        yield events.now + after
        yield server.takes(events.now, seconds)
        ends[name] = events.now

    def all_of_them() -> Task:
        yield [task("late", 1.0, 1.0), task("first", 0.0, 3.0), task("idle", 9.0, 2.0)]

    assert events.run(all_of_them()) == 11.0
    assert ends == {"first": 3.0, "late": 4.0, "idle": 11.0}
    assert server.busy == 6.0


def test_what_a_publish_moves_by_hand() -> None:
    # 2 hosts x 3 readers; a get takes 1 s + 10 bytes x 0.1 s.
    costs = replace(NOTHING, store_fixed=1.0, store_byte=0.1)
    scale = MeshScale(2, 3, rollout=1.0, score=0, train=0, published=10, relays=False)
    assert (putting(scale, costs), reading(scale, costs)) == (2.0, 12.0)
    assert simulate(scale, costs).publish == pytest.approx(14.0)
    # One host has no relays; of eight, each beyond the second adds its own time.
    assert reading(replace(scale, hosts=1, relays=True), costs) == 6.0
    chain = replace(costs, relay_byte=0.3, relay_host=0.5)
    assert reading(replace(scale, hosts=2, relays=True), chain) == 3.0
    eight = replace(scale, hosts=8, relays=True)
    assert (putting(eight, chain), reading(eight, chain)) == (0.0, 6.0)
    assert simulate(eight, chain).publish == pytest.approx(6.0)
    assert simulate(eight, chain).store_share == 0.0
    # Longer than is followed, and the same: 60 readers after the put, 2 s each.
    assert simulate(replace(scale, replicas=30), costs).publish == pytest.approx(122.0)


def test_what_relays_take_is_what_was_measured_at_that_rate() -> None:
    def one(hosts: int, gbit: float, seconds: float, publish: str = "relayed") -> dict[str, Any]:
        return dict(hosts=hosts, gbit=gbit, seconds=seconds, publish=publish, bytes=100)

    rows = [one(2, 1.0, 5.0), one(4, 1.0, 5.5), one(8, 1.0, 8.0), one(8, 1.0, 99.0, "direct")]
    assert relays_from({"rows": [*rows, one(2, 10.0, 1.0)]}, 1.0) == (0.05, 0.5)
    assert relays_from({"rows": [one(2, 10.0, 1.0), one(8, 10.0, 0.9)]}, 10.0) == (0.01, 0.0)
    with pytest.raises(SpecError, match=r"--gbit 40 was not measured; choose one of \[1.0\]"):
        relays_from({"rows": rows}, 40.0)


def test_an_answer_that_is_long_on_its_way_is_silence() -> None:
    assert simulate(IDLE, NOTHING).silence == pytest.approx(0.5)
    # Asked at 0, 0.5, ...: nothing is heard until 3.2 s, and then every half second.
    assert simulate(IDLE, replace(NOTHING, trip=3.2)).silence == pytest.approx(3.0)


def test_a_loop_that_is_behind_judges_nobody() -> None:
    costs = replace(NOTHING, beat=MessageCost(0.001, 0.001))
    assert simulate(replace(IDLE, replicas=100), costs).late_passes == 0
    behind = simulate(replace(IDLE, replicas=3000, rollout=60.0), costs)
    assert behind.late_passes > 0.5
    assert behind.loop_share == 1.0


def test_more_beats_than_can_be_served_end_no_step() -> None:
    costs = replace(NOTHING, wire=0.001)
    assert math.isfinite(simulate(replace(IDLE, replicas=400), costs).step)
    flooded = simulate(replace(IDLE, replicas=1000), costs)
    assert math.isinf(flooded.step)
    assert flooded.wire_share == 1.0
    assert math.isfinite(simulate(replace(IDLE, replicas=1000, controllers=4), costs).step)


@settings(max_examples=8, deadline=None)
@given(hosts=st.integers(2, 300), more=st.integers(1, 300), replicas=st.integers(1, 8))
def test_the_same_every_time_and_hardly_ever_better_with_more_hosts(
    hosts: int, more: int, replicas: int
) -> None:
    """A host more can fall better between the messages of the others: up to 2% in 7,500 draws."""
    costs = measured_costs()
    few = MeshScale(hosts, replicas, rollout=2.0, score=0.4, train=0.6, published=10_000_000)
    many = replace(few, hosts=hosts + more)
    first, second = simulate(few, costs), simulate(many, costs)
    assert first == simulate(few, costs)
    assert first.step >= few.compute
    assert second.step >= 0.95 * first.step
    assert second.publish >= 0.95 * first.publish
    assert second.start > first.start


def test_the_fewest_hosts_at_which_a_limit_breaks() -> None:
    assert breaks_at(lambda hosts: hosts >= 37, 1000) == 37
    assert breaks_at(lambda hosts: True, 1000) == 1
    assert breaks_at(lambda hosts: False, 1000) is None
    assert (grouped(0), grouped(3), sum(grouped(1003)), len(grouped(1003))) == (
        [], [1, 1, 1], 1003, 16,
    )  # fmt: skip


def test_suspicion_is_raised_with_the_heartbeat() -> None:
    spec = load_spec("meshes/longhealth_3b.yaml").spec
    assert suspected(replace(IDLE, heartbeat_s=5.0), spec) == pytest.approx(20.0)


def test_a_real_service_took_about_as_long_as_is_simulated() -> None:
    """Of the committed figures: what a small mesh took when they were measured."""
    for row in checks(published("controller_latency"), measured_costs()):
        assert 0.25 < row["split"] < 4
        assert 0.25 < row["update"] < 4
        assert 0.2 < row["loop"] < 2


CPU = torch.device("cpu")
SMALL = Setting(
    ShapeSpec(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64),
    Workload(3, 5, 7, 40, 16, 1, 4),
    "float32",
)


class OneProcess:
    """A tensor plane in a dict."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    async def put(self, key: str, tensors: Mapping[str, Tensor]) -> TensorRef:
        self.held[key], layout = pack(tensors)
        return TensorRef(key, layout)

    async def get(self, packet: TensorRef) -> dict[str, Tensor]:
        return unpack(self.held[packet.key], packet.layout)

    async def delete(self, *keys: str) -> None:
        for key in keys:
            del self.held[key]

    async def keys(self, prefix: str = "") -> list[str]:
        return sorted(self.held)


def test_a_step_trains_what_it_sampled_and_publishes_it() -> None:
    plane = OneProcess()
    step = PhaseStep(SMALL, CPU, plane)
    before, drawn = step.snapshot().clone(), step.samples
    step.run()
    assert not step.failures
    assert set(step.laps) == {"document", *PHASES}
    assert [len(s.response_ids) for s in step.samples] == [7, 7, 7]
    assert step.samples != drawn
    assert not torch.equal(step.snapshot(), before)
    # What the next rollout samples from is what was trained.
    sampled_from = step.rollout()
    asyncio.run(step.publish())
    assert step.rollout() == sampled_from
    assert not plane.held


def test_a_phase_that_fails_is_named_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = PhaseStep(SMALL, CPU, OneProcess())

    def broken() -> None:
        raise RuntimeError("tensors on two devices")

    monkeypatch.setattr(step, "rollout", broken)
    rows = {
        row["phase"]: row for row in measure(step, DevicePeaks("toy", 1e9, 1e9, 1e9), repeats=1)
    }
    assert "test_controller_simulation.py" in step.failures["rollout"]
    assert "RuntimeError" in step.failures["rollout"]
    assert rows["rollout"]["seconds"] is None
    assert "FAILED RuntimeError" in rows["rollout"]["error"]
    assert rows["student"]["seconds"] is not None
    assert rows["step"]["seconds"] is None  # a whole step was not measured


def test_the_goal_is_stated_in_the_cached_bound() -> None:
    name, seconds = published_bound("NVIDIA H200, measured", SETTINGS["3b"])
    assert (name, seconds) == ("H200", pytest.approx(1.06, abs=0.01))
    assert published_bound("NVIDIA A100-SXM4-80GB", SETTINGS["3b"])[1] == pytest.approx(
        2.7, abs=0.1
    )


def test_ceilings_are_those_of_some_machine() -> None:
    found = measured(CPU, torch.float32)
    assert found.mfu == 1.0
    assert 1e8 < found.flops < 1e15
    assert 1e7 < found.bandwidth < 1e14
