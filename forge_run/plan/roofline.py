"""How fast one step could be: FLOPs and bytes of each phase against a device's peaks.

The student and the document teacher are one frozen Llama-like model, so a step is four phases:

    rollout   decode token by token: bound by reading weights and KV
    teacher   one forward of prompt + response over the document's cached KV
    student   one forward and a backward without weight gradients, over the cartridge
    publish   every cartridge once over the host link

A phase takes the longer of its compute (at a stated share of peak) and its memory traffic.
Everything else a real step spends is overhead. Logits are of response tokens alone, as learning's
code computes them; counted FLOPs (tests/unit/benchmarks/test_counted.py) hold the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from deploy.manifests.sizing import (
    body_parameters,
    head_parameters,
    kv_values_per_token,
    matmul_parameters,
)
from protocols.spec.sections import ShapeSpec

MFU = 0.5  # share of peak FLOP/s that large matrix products reach in practice


@dataclass(frozen=True)
class AttentionKernel:
    """How attention is computed: whether it skips what a causal mask hides, and the FLOPs of its
    backward over its forward's."""

    causal: bool
    backward: float


FUSED = AttentionKernel(causal=True, backward=2.5)  # forms the scores again in the backward
EXPLICIT = AttentionKernel(
    causal=False, backward=2.0
)  # learning.model.attention: whole rows of scores, kept
CHUNKED = AttentionKernel(
    causal=False, backward=3.0
)  # and where they would be too many: formed again


@dataclass(frozen=True)
class DevicePeaks:
    """Peaks of one accelerator: dense bf16 FLOP/s, memory bytes/s, host link bytes/s; and the
    share of its FLOP/s that is reached, 1 for one whose ceilings were measured."""

    name: str
    flops: float
    bandwidth: float
    link: float = 25e9  # PCIe 4.0 x16, one way, as measured rather than as printed
    mfu: float = MFU


A100 = DevicePeaks("A100", 312e12, 2.039e12)
H200 = DevicePeaks("H200", 989e12, 4.8e12)


@dataclass(frozen=True)
class Workload:
    """One step on one device a role: `Workload(8, 200, 512, 12_000, 2048, 1, 2)`.

    `samples` prompts of `prompt` tokens, each answered with `response` tokens, about a document
    of `document` tokens, over a cartridge of `cartridge` tokens; `distinct` documents occur among
    them. Values take `value_bytes` (2 for bfloat16).
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
    """FLOPs and bytes of device memory traffic (for publish: of link traffic) of one phase."""

    name: str
    flops: float
    bytes: float
    over_link: bool = False

    def seconds(self, device: DevicePeaks) -> float:
        """The least time on a device, seconds."""
        if self.over_link:
            return self.bytes / device.link
        return max(self.flops / (device.mfu * device.flops), self.bytes / device.bandwidth)


def linear_flops(shape: ShapeSpec, tokens: int, predicted: int) -> float:
    """Forward FLOPs of the matrix products: 2 a weight and token. `predicted` of the tokens have
    logits."""
    return 2.0 * (body_parameters(shape) * tokens + head_parameters(shape) * predicted)


def attention_flops(
    shape: ShapeSpec, tokens: int, prefix: int, kernel: AttentionKernel = FUSED
) -> float:
    """Forward FLOPs of one causal sequence's attention, each token seeing `prefix` tokens too.

    Scores and weighted values cost 2 FLOPs each per query head, head dimension and seen token.
    """
    seen = prefix + (tokens / 2 if kernel.causal else tokens)
    return 4.0 * shape.layers * shape.heads * shape.head_dim * tokens * seen


def reading(shape: ShapeSpec, tokens: int, value_bytes: int) -> PhaseCost:
    """Reading one document of `tokens` for its keys and values, once in a run."""
    flops = linear_flops(shape, tokens, 0) + attention_flops(shape, tokens, 0)
    written = tokens * kv_values_per_token(shape)
    return PhaseCost("document", flops, (body_parameters(shape) + written) * value_bytes)


def rollout(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Decoding: weights, each distinct cartridge and every sample's own KV, once a token.

    The last token is drawn and never read, and of the prompt only the last token has logits.
    """
    kv = kv_values_per_token(shape) * work.value_bytes
    own = work.samples * (work.prompt + work.response / 2) * kv
    read = matmul_parameters(shape) * work.value_bytes + work.distinct * work.cartridge * kv + own
    decoded = work.response - 1
    # Decoding forms one token's scores at a time: no kernel wastes any there.
    flops = work.samples * (
        linear_flops(shape, work.prompt + decoded, work.response)
        + attention_flops(shape, work.prompt, work.cartridge, kernel)
        + attention_flops(shape, decoded, work.cartridge + work.prompt)
    )
    return PhaseCost("rollout", flops, work.response * read)


def teacher_cached(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Scoring with the documents' KV at hand."""
    flops = work.samples * (
        linear_flops(shape, work.sample_tokens, work.response)
        + attention_flops(shape, work.sample_tokens, work.document, kernel)
    )
    kv = work.distinct * work.document * kv_values_per_token(shape)
    return PhaseCost("teacher", flops, (matmul_parameters(shape) + kv) * work.value_bytes)


def teacher_reading(shape: ShapeSpec, work: Workload) -> PhaseCost:
    """Scoring that reads the whole document again for every sample, as a plain forward with all
    logits does: what the cache saves."""
    tokens = work.document + work.sample_tokens
    flops = work.samples * (linear_flops(shape, tokens, tokens) + attention_flops(shape, tokens, 0))
    return PhaseCost(
        "teacher, document re-read", flops, matmul_parameters(shape) * work.value_bytes
    )


def student(shape: ShapeSpec, work: Workload, kernel: AttentionKernel = FUSED) -> PhaseCost:
    """Forward, and a backward to the activations alone: the base model is frozen."""
    linear = linear_flops(shape, work.sample_tokens, work.response)
    attention = attention_flops(shape, work.sample_tokens, work.cartridge, kernel)
    flops = work.samples * (2 * linear + (1 + kernel.backward) * attention)
    cartridges = work.distinct * work.cartridge * kv_values_per_token(shape)
    return PhaseCost(
        "student", flops, 2 * (matmul_parameters(shape) + cartridges) * work.value_bytes
    )


def publish(shape: ShapeSpec, cartridges: int, tokens: int, value_bytes: int) -> PhaseCost:
    """One packed snapshot of every cartridge."""
    total = cartridges * tokens * kv_values_per_token(shape) * value_bytes
    return PhaseCost("publish", 0.0, float(total), over_link=True)
