"""Bound the time of one step: FLOPs and bytes of each phase against a device's peaks.

The student and the document teacher are one frozen Llama-like model, so a step has four phases:

    rollout   decode token by token: bound by reading weights and KV
    teacher   one forward of prompt + response over the document's cached KV
    student   one forward and a backward without weight gradients, over the cartridge
    publish   every cartridge once over the host link

A phase takes the longer of its compute (at a stated share of peak) and its memory traffic. The rest
of a real step is overhead. Logits are counted for response tokens only, as in `learning`. A test
checks the formulas against counted FLOPs (tests/unit/benchmarks/test_counted.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from cartridge_forge.protocols.spec.model import (
    ShapeSpec,
    body_parameters,
    head_parameters,
    kv_values_per_token,
    matmul_parameters,
)

MFU = 0.5  # share of peak FLOP/s that large matrix products reach in practice


@dataclass(frozen=True)
class AttentionKernel:
    """Describe an attention kernel: whether it skips what a causal mask hides, and the ratio of its
    backward's FLOPs to its forward's."""

    causal: bool
    backward: float


FUSED = AttentionKernel(causal=True, backward=2.5)  # recomputes the scores in the backward
# Forms hidden scores too, and again in the backward pass: learning.attention.CHUNKED.
EXPLICIT = AttentionKernel(causal=False, backward=2.5)


@dataclass(frozen=True)
class DevicePeaks:
    """Hold an accelerator's peaks: dense bf16 FLOP/s, memory bytes/s, host link bytes/s. `mfu` is
    the share of `flops` that is reached, 1 for a device whose ceilings were measured."""

    name: str
    flops: float
    bandwidth: float
    link: float = 25e9  # PCIe 4.0 x16, one way, as measured rather than as printed
    mfu: float = MFU


A100 = DevicePeaks("A100", 312e12, 2.039e12)
H200 = DevicePeaks("H200", 989e12, 4.8e12)


@dataclass(frozen=True)
class Workload:
    """Describe one step on one device of a role: `Workload(8, 200, 512, 12_000, 2048, 1, 2)`.

    `samples` prompts of `prompt` tokens get `response` tokens each. They are about documents of
    `document` tokens, over cartridges of `cartridge` tokens; `distinct` documents occur among them.
    Values take `value_bytes` (2 for bfloat16).
    """

    samples: int
    prompt: int
    response: int
    document: int
    cartridge: int
    distinct: int
    value_bytes: int

    @property
    def sample_tokens(self) -> int:
        return self.prompt + self.response


@dataclass(frozen=True)
class PhaseCost:
    """Hold one phase's FLOPs and bytes of device memory traffic (for publish: of link traffic)."""

    name: str
    flops: float
    bytes: float
    over_link: bool = False

    def seconds(self, device: DevicePeaks) -> float:
        """Return the least time on a device, seconds."""
        if self.over_link:
            return self.bytes / device.link
        return max(self.flops / (device.mfu * device.flops), self.bytes / device.bandwidth)


def divided(cost: PhaseCost, parts: int) -> PhaseCost:
    """Return the cost for each of so many devices that divide a phase's layers evenly."""
    return replace(cost, flops=cost.flops / parts, bytes=cost.bytes / parts)


def linear_flops(shape: ShapeSpec, tokens: int, predicted: int) -> float:
    """Return forward FLOPs of the matrix products: 2 per weight and token. `predicted` of the
    tokens have logits."""
    return 2.0 * (body_parameters(shape) * tokens + head_parameters(shape) * predicted)


def attention_flops(
    shape: ShapeSpec, tokens: int, prefix: int, kernel: AttentionKernel = FUSED
) -> float:
    """Return forward FLOPs of a causal sequence's attention; each token also sees `prefix` tokens.
    Scores and weighted values cost 2 FLOPs each per query head, head dimension and seen token."""
    visible = prefix + (tokens / 2 if kernel.causal else tokens)
    return 4.0 * shape.layers * shape.heads * shape.head_dim * tokens * visible


def reading(shape: ShapeSpec, tokens: int, value_bytes: int) -> PhaseCost:
    """Return the cost of computing a document's keys and values, once per run."""
    flops = linear_flops(shape, tokens, 0) + attention_flops(shape, tokens, 0)
    kv_values = tokens * kv_values_per_token(shape)
    return PhaseCost("document", flops, (body_parameters(shape) + kv_values) * value_bytes)


def rollout(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Return the cost of decoding: each token reads weights, each distinct cartridge and all own
    KV. The last token is sampled but never read, and of the prompt only the last token has logits.
    """
    kv = kv_values_per_token(shape) * work.value_bytes
    own_values = work.samples * (work.prompt + work.response / 2) * kv
    read = (
        matmul_parameters(shape) * work.value_bytes
        + work.distinct * work.cartridge * kv
        + own_values
    )
    decoded = work.response - 1
    # Decoding computes one token's scores at a time, so `kernel` makes no difference there.
    flops = work.samples * (
        linear_flops(shape, work.prompt + decoded, work.response)
        + attention_flops(shape, work.prompt, work.cartridge, kernel)
        + attention_flops(shape, decoded, work.cartridge + work.prompt)
    )
    return PhaseCost("rollout", flops, work.response * read)


def teacher_cached(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Return the cost of scoring with the documents' KV cached."""
    flops = work.samples * (
        linear_flops(shape, work.sample_tokens, work.response)
        + attention_flops(shape, work.sample_tokens, work.document, kernel)
    )
    kv = work.distinct * work.document * kv_values_per_token(shape)
    return PhaseCost("teacher", flops, (matmul_parameters(shape) + kv) * work.value_bytes)


def teacher_reading(shape: ShapeSpec, work: Workload) -> PhaseCost:
    """Return the cost of scoring that reads the whole document again for every sample. This is a
    plain forward with all logits; the cache saves the difference."""
    tokens = work.document + work.sample_tokens
    flops = work.samples * (linear_flops(shape, tokens, tokens) + attention_flops(shape, tokens, 0))
    return PhaseCost(
        "teacher, document re-read", flops, matmul_parameters(shape) * work.value_bytes
    )


def student(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Return the cost of a forward, and of a backward to activations only: the base model is
    frozen."""
    linear = linear_flops(shape, work.sample_tokens, work.response)
    attention = attention_flops(shape, work.sample_tokens, work.cartridge, kernel)
    flops = work.samples * (2 * linear + (1 + kernel.backward) * attention)
    cartridges = work.distinct * work.cartridge * kv_values_per_token(shape)
    return PhaseCost(
        "student", flops, 2 * (matmul_parameters(shape) + cartridges) * work.value_bytes
    )


def publish(shape: ShapeSpec, cartridges: int, tokens: int, value_bytes: int) -> PhaseCost:
    """Return the cost of sending one packed snapshot of every cartridge."""
    total = cartridges * tokens * kv_values_per_token(shape) * value_bytes
    return PhaseCost("publish", 0.0, float(total), over_link=True)
