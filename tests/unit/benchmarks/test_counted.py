"""The analysis of a step against what its code really does: FLOPs counted, bytes of real tensors.

The analysis computes every layer at every token. The decoder does less, exactly as counted here: a
sample's last token is not read, and the last layer has queries, and what follows them, only where a
token is predicted.
"""

import math

import pytest
import torch

from benchmarks.gpu.phase_step import SETTINGS, PhaseStep, Setting, bounds
from benchmarks.meters import counted
from cartridge_forge.forge_run.plan import roofline
from cartridge_forge.forge_run.plan.roofline import EXPLICIT, Workload
from cartridge_forge.learning.decode import DecodeCache
from cartridge_forge.learning.teacher import PREFILL_CHUNK, document_kv
from cartridge_forge.protocols.spec.model import (
    ShapeSpec,
    body_parameters,
    head_parameters,
    kv_values_per_token,
    matmul_parameters,
)
from cartridge_forge.services.planes.codec import layout_of, packed_bytes

CPU = torch.device("cpu")

TINY = SETTINGS["tiny"]


@pytest.fixture(autouse=True)
def without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of a CPU are padded by up to 31 rows, which no analysis counts."""
    monkeypatch.setattr("cartridge_forge.learning.decoder.PADDED_TO", 1)


@pytest.fixture(scope="module")
def step() -> PhaseStep:
    return PhaseStep(TINY, CPU)


def with_layers(layers: int) -> Setting:
    work = Workload(3, 5, 7, 40, 16, 1, 4)
    shape = ShapeSpec(
        layers=layers, hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=48, vocab=64
    )
    return Setting(shape, work, "float32")


def layer_weights(shape: ShapeSpec) -> tuple[int, int]:
    """The weights of one layer: of keys and values, and of all else."""
    kv = 2 * shape.hidden * shape.kv_heads * shape.head_dim
    return kv, body_parameters(shape) // shape.layers - kv


def attention_of(shape: ShapeSpec, queries: int, seen: int) -> int:
    """One layer's products, hidden ones too."""
    return 4 * shape.heads * shape.head_dim * queries * seen


def forward_flops(shape: ShapeSpec, tokens: int, predicted: int, prefix: int) -> int:
    """A sequence of `tokens` over a prefix, with `predicted` logits."""
    kv, other = layer_weights(shape)
    inner = 2 * (kv + other) * tokens + attention_of(shape, tokens, prefix + tokens)
    last = 2 * (kv * tokens + other * predicted)
    last += attention_of(shape, predicted, prefix + tokens) if predicted else 0
    return (shape.layers - 1) * inner + last + 2 * head_parameters(shape) * predicted


def test_teacher_and_student(step: PhaseStep) -> None:
    analysis, counts, work = bounds(TINY, EXPLICIT), step.counts(), TINY.work
    read = work.sample_tokens - 1
    teacher = forward_flops(TINY.shape, read, work.response, work.document)
    assert counts["teacher"].flops == work.samples * teacher
    assert 0.75 < counts["teacher"].flops / analysis["teacher"].flops < 1
    assert 0.75 < counts["student"].flops / analysis["student"].flops < 1


def test_every_further_layer_of_the_student() -> None:
    """Forward, and a backward without weight gradients: with them it would be half as much more.
    The backward forms the scores anew: 2.5 times attention's forward."""
    two, six = with_layers(2), with_layers(6)
    more = (
        PhaseStep(six, CPU).counts()["student"].flops
        - PhaseStep(two, CPU).counts()["student"].flops
    )
    read, work = six.work.sample_tokens - 1, six.work
    linear = 2 * sum(layer_weights(six.shape)) * read
    attention = attention_of(six.shape, read, work.cartridge + read)
    assert more == 4 * work.samples * (2 * linear + 3.5 * attention)


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
    work, shape = setting.work, setting.shape
    prompt = forward_flops(shape, work.prompt, 1, work.cartridge)
    decoded = sum(
        roofline.linear_flops(shape, 1, 1)
        + shape.layers * attention_of(shape, 1, work.cartridge + work.prompt + t)
        for t in range(1, work.response)
    )
    assert count.flops == work.samples * (prompt + decoded)
    assert 0.8 < count.flops / analysis.flops < 1


def test_reading_a_document(step: PhaseStep) -> None:
    tokens, shape = TINY.work.document, TINY.shape
    with counted() as count:
        document_kv(step.model, tuple(range(tokens)))
    chunks = [min(PREFILL_CHUNK, tokens - at) for at in range(0, tokens, PREFILL_CHUNK)]
    assert len(chunks) == 2
    done = flops = 0
    for chunk in chunks:
        flops += forward_flops(shape, chunk, 0, done)
        done += chunk
    assert count.flops == flops
    assert 0.6 < count.flops / roofline.reading(shape, tokens, 4).flops < 1


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
    rows, columns = work.samples, work.sample_tokens
    cache = DecodeCache.empty(step.model, rows, columns)
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
