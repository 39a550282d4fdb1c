"""The analysis of a step against what its code really does: FLOPs counted, bytes of real tensors.

The formulas with EXPLICIT attention are those of learning.model.attention. In the student's
backward the
first layer needs no gradient of its input, which the formula does not know; what a further layer
costs is exact.
"""

from dataclasses import replace

import pytest
import torch

from benchmarks.phase_step import SETTINGS, PhaseStep, Setting, bounds
from forge_run.plan.roofline import CHUNKED, EXPLICIT, FUSED, Workload
from learning.model import attention
from protocols.spec.sections import ShapeSpec

CPU = torch.device("cpu")


def with_layers(layers: int) -> Setting:
    work = Workload(3, 5, 7, 40, 16, 1, 4)
    shape = ShapeSpec(
        layers=layers, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64
    )
    return Setting(shape, work, "float32")


def test_attention_in_chunks_costs_a_forward_more_and_keeps_no_scores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = with_layers(6)
    whole = PhaseStep(setting, CPU).counts()["student"]
    monkeypatch.setattr(attention, "SCORE_BYTES", 4 * 3 * 4 * (16 + 12) * 5)  # 5 queries of 12
    chunked = PhaseStep(setting, CPU).counts()["student"]
    least, more = (bounds(setting, kernel)["student"].flops for kernel in (EXPLICIT, CHUNKED))
    # But for the last product, weights over the row's own values, which nothing asks for again.
    last = 3 * 2 * 6 * 4 * 8 * 12 * 12
    assert chunked.flops - whole.flops == more - least - last
    scores = 6 * 4 * 3 * 12 * (16 + 12) * 4
    assert whole.saved - chunked.saved > 0.8 * scores


def test_the_seed_s_size_in_shape_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of Llama-3.2-3B at the seed's workload: counted on tensors without memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    # Without memory nothing is too large to be made at once: a thousand chunks take long to trace.
    monkeypatch.setattr(attention, "SCORE_BYTES", 1 << 60)
    monkeypatch.setattr(attention, "CACHED_SCORE_BYTES", 1 << 60)
    seed = SETTINGS["3b"]
    few = replace(seed, shape=seed.shape.model_copy(update={"layers": 2}))
    size = (2, 2, seed.shape.kv_heads, seed.work.document, seed.shape.head_dim)
    with FakeTensorMode(allow_non_fake_inputs=True):
        document = torch.empty(size, dtype=torch.bfloat16)
        counts = PhaseStep(few, CPU, document=document).counts()
    analysis = bounds(few, EXPLICIT)
    assert counts["teacher"].flops == pytest.approx(analysis["teacher"].flops, rel=1e-6)
    assert counts["student"].flops == pytest.approx(analysis["student"].flops, rel=0.03)
    # Forming every score costs a little more than a kernel that skips what is hidden.
    least = bounds(few, FUSED)
    assert 1.0 < counts["teacher"].flops / least["teacher"].flops < 1.02
