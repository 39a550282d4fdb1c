"""The calibration of a plan: which runs it is for, what it measures, and the times by hand."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from cartridge_forge.forge_run.plan.calibration import computes_here, host_peaks, least_seconds
from cartridge_forge.forge_run.plan.plan import plan, step_workload
from cartridge_forge.forge_run.plan.roofline import DevicePeaks
from cartridge_forge.plugins.spec_files.loading import load_spec

MESH = str(Path(__file__).parents[4] / "meshes/longhealth.yaml")


def test_it_is_for_runs_on_this_machine_without_gpus() -> None:
    assert computes_here(load_spec(MESH).spec)
    assert not computes_here(load_spec(MESH, sets=["roles.trainer.gpus=1"]).spec)
    addresses = "hosts={kind: addresses, addresses: ['tcp://a:1']}"
    assert not computes_here(load_spec(MESH, sets=[addresses]).spec)
    # A role that this run does not have may have GPUs.
    assert computes_here(load_spec(MESH, sets=["roles.environment.gpus=1"]).spec)


def test_the_best_of_several_is_taken_until_the_time_is_up() -> None:
    # Reads of the clock: the start, two of each piece of work, one before each further piece.
    took = iter(accumulate([10.0, 0.0, 0.3, 0.0, 0.2, 0.0, 0.0, 0.1, 0.0]))
    done: list[int] = []
    assert round(least_seconds(lambda: done.append(1), lambda: next(took)), 6) == 0.2
    assert len(done) == 2


def test_this_machine_has_ceilings() -> None:
    peaks = host_peaks()
    assert peaks.mfu == 1.0
    assert 1e8 < peaks.flops < 1e14
    assert 1e7 < peaks.bandwidth == peaks.link < 1e13


def test_the_times_are_the_roofline_at_the_ceilings() -> None:
    spec = load_spec(MESH).spec
    host = DevicePeaks("this machine", 50e9, 10e9, link=10e9, mfu=1.0)
    (section,) = (s for s in plan(spec, host=host) if s.title.startswith("roofline"))
    assert section.columns == ("phase", "FLOP", "bytes", "this machine")
    # Two generators share this machine: their work is not divided.
    alone = step_workload(load_spec(MESH, sets=["roles.generator.replicas=1"]).spec)
    rollout = alone[0][0]
    assert rollout.flops / 50e9 > rollout.bytes / 10e9
    cells = {row[0]: row[3] for row in section.rows}
    assert cells["rollout"].split(" .. ")[0] == f"{rollout.flops / 50e9 * 1000:.0f} ms"
    least = sum(low.seconds(host) for low, _ in alone[:-1])
    assert cells["180 steps"].split(" .. ")[0] == f"{180 * least:,.0f} s"
