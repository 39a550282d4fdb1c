"""The cost model of exact serving against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cartridge_forge.plugins.decoding.verified.cost import (
    H200,
    MachinePeaks,
    ServedLoad,
    best_draft,
    kept_tokens,
    pass_seconds,
)
from cartridge_forge.protocols.spec.model import ShapeSpec

# Weights: 2 x 2 x (2 x 1 + 2 x 1) = 16 of attention, 3 x 2 x 3 = 18 of the MLP, 2 x 5 = 10 of the
# head: 44. A token's keys and values: 2 x 2 = 4.
TINY = ShapeSpec(layers=1, hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=3, vocab=5)
# Llama-3.2-3B: 3.2e9 weights in products, 114,688 bytes of KV a token.
THREE_B = ShapeSpec(
    layers=28, hidden=3072, heads=24, kv_heads=8, head_dim=128, intermediate=8192, vocab=128_256
)


def test_a_pass_takes_the_longer_of_its_flops_and_its_bytes() -> None:
    load = ServedLoad(rows=3, documents=2, document=100, cartridge=10, row_tokens=20)
    # 3 x 4 tokens, each 2 x 44 + 4 x 1 x 2 x (100 + 20) = 1048 FLOPs: 12,576.
    flops_bound = MachinePeaks("slow", flops=1.0, bandwidth=1e9)
    assert pass_seconds(TINY, 2, flops_bound, load, 4, 100) == 12_576
    # 44 weights, 4 x (2 x 100 + 3 x 20) = 1,040 of KV: 1,084 numbers of 2 bytes.
    bytes_bound = MachinePeaks("far", flops=1e9, bandwidth=1.0)
    assert pass_seconds(TINY, 2, bytes_bound, load, 4, 100) == 2_168
    slow_start = replace(bytes_bound, pass_seconds=100.0)
    assert pass_seconds(TINY, 2, slow_start, load, 4, 100) == 2_268


def test_a_round_keeps_what_is_accepted_and_one_in_place_of_what_is_not() -> None:
    assert kept_tokens(1, 0.0) == 1.0  # the refused one is replaced
    assert kept_tokens(4, 0.5) == 1.875  # 1 + 1/2 + 1/4 + 1/8
    assert kept_tokens(8, 1.0) == 8.0


def test_the_best_draft_by_hand() -> None:
    # By bytes alone: the document's pass reads 44 + 4 x 1,000 = 4,044 numbers, the draft's
    # 44 + 4 x 10 = 84. With everything accepted 16 tokens take 16 x 84 + 4,044 = 5,388 for 64,704.
    peaks = MachinePeaks("far", flops=1e18, bandwidth=1.0)
    load = ServedLoad(rows=1, documents=1, document=1000, cartridge=10, row_tokens=0)
    sure = best_draft(TINY, 1, peaks, load, 1.0)
    assert (sure.block, sure.gain) == (16, pytest.approx(64_704 / 5_388))
    # Nothing accepted: a round of one costs 84 more than the document alone.
    never = best_draft(TINY, 1, peaks, load, 0.0)
    assert (never.block, never.gain) == (1, pytest.approx(4_044 / 4_128))
    assert sure.pays
    assert not never.pays


def test_it_pays_over_many_long_documents_and_not_for_a_row_or_a_shared_one() -> None:
    """64 streams of 12,000 tokens read 88 GB of KV a token against 6.4 GB of weights."""
    own_documents = ServedLoad(64, 64, 12_000, 512, 256)
    gains = {
        "own": best_draft(THREE_B, 2, H200, own_documents, 0.8).gain,
        "shared": best_draft(THREE_B, 2, H200, replace(own_documents, documents=1), 0.8).gain,
        "one": best_draft(THREE_B, 2, H200, ServedLoad(1, 1, 12_000, 512, 256), 0.8).gain,
    }
    assert gains["own"] > 2 > 1.2 > gains["one"]
    assert gains["shared"] < 1
    assert best_draft(THREE_B, 2, H200, own_documents, 0.95).gain > gains["own"]
