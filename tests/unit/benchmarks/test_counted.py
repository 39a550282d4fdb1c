"""The analysis of a step against what its code really does: FLOPs counted, bytes of real tensors.

The formulas with EXPLICIT attention are those of learning.model.attention. In the student's
backward the
first layer needs no gradient of its input, which the formula does not know; what a further layer
costs is exact.
"""

import math

import pytest
import torch

from benchmarks.meters import counted
from benchmarks.phase_step import SETTINGS, PhaseStep, Setting, bounds
from deploy.manifests.sizing import kv_values_per_token, matmul_parameters
from forge_run.plan import roofline
from forge_run.plan.roofline import EXPLICIT, Workload
from learning.model.attention import DecodeCache, kv_shape
from learning.model.document_kv import PREFILL_CHUNK, document_kv
from protocols.spec.sections import ShapeSpec
from services.planes.codec import layout_of, packed_bytes

CPU = torch.device("cpu")

TINY = SETTINGS["tiny"]


@pytest.fixture(scope="module")
def step() -> PhaseStep:
    return PhaseStep(TINY, CPU)


def with_layers(layers: int) -> Setting:
    work = Workload(3, 5, 7, 40, 16, 1, 4)
    shape = ShapeSpec(
        layers=layers, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64
    )
    return Setting(shape, work, "float32")


def test_teacher_and_student(step: PhaseStep) -> None:
    analysis, counts = bounds(TINY, EXPLICIT), step.counts()
    assert counts["teacher"].flops == pytest.approx(analysis["teacher"].flops, rel=1e-6)
    assert counts["student"].flops == pytest.approx(analysis["student"].flops, rel=0.05)
    assert counts["student"].flops < analysis["student"].flops  # the first layer's gradients


def test_every_further_layer_of_the_student() -> None:
    """Forward, and a backward without weight gradients: with them it would be half as much more."""
    two, six = with_layers(2), with_layers(6)
    more = (
        PhaseStep(six, CPU).counts()["student"].flops
        - PhaseStep(two, CPU).counts()["student"].flops
    )
    formula = bounds(six, EXPLICIT)["student"].flops - bounds(two, EXPLICIT)["student"].flops
    assert more == formula


def test_decoding_one_token(step: PhaseStep) -> None:
    work, shape = TINY.work, TINY.shape
    filled = 30
    decode = step.decoding(filled)
    with counted() as count:
        decode()
    one = roofline.linear_flops(shape, 1, 1)
    one += roofline.attention_flops(shape, 1, work.cartridge + filled, EXPLICIT)
    assert count.flops == work.samples * one


def test_a_whole_rollout() -> None:
    setting = with_layers(2)
    analysis, step = bounds(setting, EXPLICIT)["rollout"], PhaseStep(setting, CPU)
    with counted() as count:
        step.rollout()
    # The formula's decoding sees half a token less than the steps do.
    assert count.flops == pytest.approx(analysis.flops, rel=0.005)


def test_reading_a_document(step: PhaseStep) -> None:
    tokens, shape = TINY.work.document, TINY.shape
    with counted() as count:
        document_kv(step.model, tuple(range(tokens)))
    chunks = [min(PREFILL_CHUNK, tokens - at) for at in range(0, tokens, PREFILL_CHUNK)]
    assert len(chunks) == 2
    done, attention = 0, 0.0
    for chunk in chunks:
        attention += roofline.attention_flops(shape, chunk, done, EXPLICIT)
        done += chunk
    assert count.flops == roofline.linear_flops(shape, tokens, 0) + attention
    assert roofline.reading(shape, tokens, 4).flops < count.flops


def test_bytes_of_real_tensors(step: PhaseStep) -> None:
    shape, work = TINY.shape, TINY.work
    matrices = [p for p in step.model.parameters() if p.ndim == 2]  # the head is the embedding
    weights = matmul_parameters(shape)
    assert sum(p.nbytes for p in matrices) == weights * work.value_bytes
    kv = kv_values_per_token(shape) * work.value_bytes
    assert step.cache.get("document").nbytes == work.document * kv
    snapshot = step.snapshot()[None]
    assert snapshot.nbytes == work.cartridge * kv == bounds(TINY)["publish"].bytes
    assert packed_bytes(layout_of({"kv": snapshot})) == math.ceil(snapshot.nbytes / 64) * 64
    layers, heads, _ = kv_shape(step.model)
    rows, columns = work.samples, work.sample_tokens
    cache = DecodeCache.empty(snapshot, layers, rows, heads, columns)
    assert cache.keys.nbytes + cache.values.nbytes == rows * columns * kv
    halfway = rows * (work.prompt + work.response / 2) * kv
    read = weights * work.value_bytes + snapshot.nbytes + halfway
    assert bounds(TINY)["rollout"].bytes == work.response * read


def test_traffic_and_what_is_kept_by_hand() -> None:
    a = torch.ones(4, 8, requires_grad=True)
    weight = torch.ones(8, 2)
    with counted(iter([weight])) as count:
        product = (a @ weight).t()  # a view moves nothing
        product.relu().sum().backward()
    # forward: 4x8 and 8x2 in, 4x2 out; relu 8 in, 8 out; sum 8 in, 1 out
    forward = 4 * ((32 + 16 + 8) + 16 + 9)
    assert count.flops == 2 * 4 * 8 * 2 + 2 * 4 * 2 * 8  # and of a's gradient
    assert count.traffic > forward
    assert count.saved == 8 * 4  # relu's result; the weight is known
