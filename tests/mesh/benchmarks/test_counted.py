"""The step at the seed's size, counted on tensors without memory, against its analysis."""

import pytest

from benchmarks.gpu.phase_step import SETTINGS, bounds
from benchmarks.step_gpu import dry
from cartridge_forge.forge_run.plan.roofline import EXPLICIT


def test_the_seed_s_size_in_shape_alone() -> None:
    """The analysis takes the last layer at every token, the code where a token is predicted."""
    setting = SETTINGS["3b"]
    counted, analysis = dry(setting), bounds(setting, EXPLICIT)
    for phase in ("teacher", "student"):
        assert counted[phase]["flops"] == pytest.approx(analysis[phase].flops, rel=1 / 28)
