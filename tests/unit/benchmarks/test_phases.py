"""A step's phases: each leaves its seconds, and one that fails does not take the others with it."""

import asyncio
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.phase_step import PHASES, SETTINGS, PhaseStep, Setting
from benchmarks.step_gpu import measure, measured, published_bound
from cartridge_forge.forge_run.plan.roofline import DevicePeaks, Workload
from cartridge_forge.protocols.spec.model import ShapeSpec
from cartridge_forge.protocols.step import TensorRef
from cartridge_forge.services.planes.codec import pack, unpack

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
    assert "test_phases.py" in step.failures["rollout"]
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
