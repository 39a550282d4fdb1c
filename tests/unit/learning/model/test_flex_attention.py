"""FlexAttention uncompiled against the explicit form, and the shapes that it is compiled for."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learning.model import flex_attention
from learning.model.attention import UNSEEN, _in_memory
from learning.model.flex_attention import TOKENS, bucket, flex_attention_over

SCALE = 0.3


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("kind", ["causal", "hidden", "all"])
@pytest.mark.parametrize(("rows", "queries", "seen"), [(3, 40, 40), (2, 130, 130), (1, 9, 150)])
def test_flex_attention_equals_the_explicit_form(
    rows: int, queries: int, seen: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its sums, and with its gradients, which torch has for the uncompiled form on a CPU too,
    and hides there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    draws = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).requires_grad_()

    q, k, v = normal(rows, 6, queries, 8), normal(rows, 2, seen, 8), normal(rows, 2, seen, 8)
    hidden = torch.rand(rows, 1, queries, seen, generator=draws) < 0.5
    hidden[..., 0] = False
    mask = torch.zeros(hidden.shape).masked_fill(hidden, UNSEEN) if kind == "hidden" else None
    results = []
    for kernel in (_in_memory, flex_attention_over):
        out, sums = kernel(q, k, v, mask, kind == "causal", SCALE)
        weight = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
        loss = (out * weight).sum() + (sums * weight[..., 0]).sum()
        results.append([out, sums, *torch.autograd.grad(loss, [q, k, v])])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(st.integers(1, 1 << 20), st.sampled_from([1, TOKENS]))
def test_a_bucket_holds_little_more(count: int, unit: int) -> None:
    size = bucket(count, unit)
    assert count <= size < max(count * 9 / 8, count + unit)
    assert size % unit == 0
    assert bucket(size, unit) == size
    assert bucket(count + 1, unit) >= size


def test_buckets_by_hand() -> None:
    assert [bucket(n) for n in (1, 2, 16, 17, 18, 33, 100)] == [1, 2, 16, 18, 18, 36, 104]
    assert [bucket(n, TOKENS) for n in (1, 128, 712, 1025, 5696, 12_000)] == [
        128, 128, 768, 1152, 6144, 12_288,
    ]  # fmt: skip
    for most in (4096, 1 << 17):
        sizes = {bucket(n, TOKENS) for n in range(1, most + 1)}
        assert len(sizes) == 8 + 8 * int(math.log2(most / 1024))


def test_shapes_that_are_compiled_over_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """500 micro-batches of up to 8 sequences of up to 2,048 tokens."""
    shapes: set[tuple[int, ...]] = set()

    def recorded(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
        shapes.add((*query.shape, *key.shape))
        return query, SimpleNamespace(lse=query[..., 0])

    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", recorded)
    monkeypatch.setattr(flex_attention, "_blocks", lambda *_: None)
    draws, exact = random.Random("shapes"), set()
    for _ in range(500):
        rows, length = draws.randint(1, 8), draws.randint(700, 2048)
        exact.add((rows, length))
        query, key = (torch.zeros(1).expand(rows, h, length, 4) for h in (4, 2))
        flex_attention_over(query, key, key, None, True, 1.0)
    assert len(exact) > 450
    # 8 counts of rows, 13 lengths.
    assert len(shapes) <= 8 * 13 < flex_attention.SHAPES
