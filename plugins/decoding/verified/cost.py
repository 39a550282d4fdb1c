"""Bound the time of exact serving against the document alone: where a draft pays.

A step of the document alone is one forward pass of one token a row. A round of exact serving is K
passes of one token over the cartridges, then one of K tokens a row over the documents; of these a
round keeps 1 + a + ... + a^(K-1) tokens where each is accepted with probability a. A pass takes the
longer of its FLOPs and its bytes, and a fixed time:

    FLOPs  n tokens: 2 n weights + 4 n L H_q D (prefix + own tokens)
    bytes  weights + KV of each distinct prefix, once + KV of each row's own tokens

So a draft pays where reading the documents is what a step takes: many rows, each over a long
document of its own. A single row gains little, for the weights are read either way; rows over one
document gain nothing, for it is read once. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from cartridge_forge.plugins.decoding.verified.rules import LONGEST_BLOCK
from cartridge_forge.protocols.spec.model import ShapeSpec, kv_values_per_token, matmul_parameters


@dataclass(frozen=True)
class MachinePeaks:
    """Hold what a machine reaches: FLOP/s, bytes/s of memory, and the seconds of a pass that no
    FLOP or byte explains."""

    name: str
    flops: float
    bandwidth: float
    pass_seconds: float = 0.0


# bfloat16 at half of the peak that is printed, as the plan of a run has it.
H200 = MachinePeaks("H200", 0.5 * 989e12, 4.8e12)


@dataclass(frozen=True)
class ServedLoad:
    """Describe what is decoded together: `ServedLoad(64, 64, 12_000, 2048, 256)` are 64 rows, each
    over a document of its own of 12,000 tokens or a cartridge of 2,048, with 256 own tokens (the
    prompt, and half of the response) on average."""

    rows: int
    documents: int
    document: int
    cartridge: int
    row_tokens: int


@dataclass(frozen=True)
class DraftGain:
    """Tell the best number of tokens to propose, and how many times as fast as the document alone a
    token is then; below 1 it is slower."""

    block: int
    gain: float

    @property
    def pays(self) -> bool:
        return self.gain > 1.0


def pass_seconds(
    shape: ShapeSpec, value_bytes: int, peaks: MachinePeaks, load: ServedLoad, tokens: int,
    prefix: int,
) -> float:  # fmt: skip
    """Return the seconds of one forward pass of `tokens` a row, each row over a prefix of so many
    tokens; a number takes `value_bytes`."""
    count, weights = load.rows * tokens, matmul_parameters(shape)
    scores = shape.layers * shape.heads * shape.head_dim * (prefix + load.row_tokens)
    flops = count * (2.0 * weights + 4.0 * scores)
    kv_tokens = load.documents * prefix + load.rows * load.row_tokens
    read = (weights + kv_values_per_token(shape) * kv_tokens) * value_bytes
    return max(flops / peaks.flops, read / peaks.bandwidth) + peaks.pass_seconds


def kept_tokens(block: int, accepted: float) -> float:
    """Return the mean number of tokens that a round of `block` proposed ones adds to a response,
    where each is accepted with this probability: a refused one is replaced."""
    return sum(accepted**index for index in range(block))


def best_draft(
    shape: ShapeSpec, value_bytes: int, peaks: MachinePeaks, load: ServedLoad, accepted: float
) -> DraftGain:
    """Return the block, 1 to LONGEST_BLOCK, that yields most tokens a second, and its gain over the
    document alone."""
    document_step = pass_seconds(shape, value_bytes, peaks, load, 1, load.document)
    drafting = pass_seconds(shape, value_bytes, peaks, load, 1, load.cartridge)

    def gain(block: int) -> float:
        verifying = pass_seconds(shape, value_bytes, peaks, load, block, load.document)
        return document_step * kept_tokens(block, accepted) / (block * drafting + verifying)

    best = max(range(1, LONGEST_BLOCK + 1), key=gain)
    return DraftGain(best, gain(best))
