"""The analysis of a step at the seed's size, against what its code does there."""

from dataclasses import replace

import torch

from benchmarks.phase_step import SETTINGS, PhaseStep, bounds

CPU = torch.device("cpu")


def test_the_seed_s_size_in_shape_alone() -> None:
    """Two layers of Llama-3.2-3B at the seed's workload: counted on tensors without memory. Of the
    last of two layers much is left out: the analysis computes it at every token."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    seed = SETTINGS["3b"]
    few = replace(seed, shape=seed.shape.model_copy(update={"layers": 2}))
    size = (2, 2, seed.shape.kv_heads, seed.work.document, seed.shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        document = torch.empty(size, dtype=torch.bfloat16)
        counts = PhaseStep(few, CPU, document=document).counts()
    analysis = bounds(few)
    for phase in ("teacher", "student"):
        assert 0.8 < counts[phase].flops / analysis[phase].flops < 1.0
