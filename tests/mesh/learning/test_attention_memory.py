"""Attention that never has all its scores: chunks of queries, and FlexAttention uncompiled, against
the explicit form."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from learning.model import flex_attention
from learning.model.attention import PrefixContext, cartridge_attention

if TYPE_CHECKING:
    pass

SCALE = 0.3


def case(groups: int, rows: int, length: int, prefix: int, seed: int = 0) -> tuple[Tensor, ...]:
    """query, key, value, mask of packed rows, kv [C, 2, 2, H, P, D] of two layers, lengths."""
    draws = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws).requires_grad_()

    batch, size, kv_heads, shared = groups * rows, 8, 2, 3
    segments = torch.randint(0, 3, (batch, length), generator=draws).sort(-1).values
    mask = (segments[:, :, None] == segments[:, None, :]).tril()[:, None]
    lengths = torch.randint(1, prefix + 1, (groups,), generator=draws)
    return (
        normal(batch, kv_heads * shared, length, size), normal(batch, kv_heads, length, size),
        normal(batch, kv_heads, length, size), mask,
        normal(groups, 2, 2, kv_heads, prefix, size), lengths,
    )  # fmt: skip


def attend(given: tuple[Tensor, ...], lengths: Tensor | None, prefixed: bool) -> Tensor:
    query, key, value, mask, kv, _ = given
    context = PrefixContext(kv=kv if prefixed else None, lengths=lengths)
    module: Any = SimpleNamespace(layer_idx=1)
    return cartridge_attention(module, query, key, value, mask, SCALE, context)[0]


def by_flex(given: tuple[Tensor, ...], lengths: Tensor | None, prefixed: bool) -> Tensor:
    query, key, value, mask, kv, _ = given
    layer = kv[:, 1] if prefixed else None
    return flex_attention.flex_attention_over(query, key, value, mask, SCALE, layer, lengths, {})


def gradients(out: Tensor, given: tuple[Tensor, ...], prefixed: bool) -> list[Tensor]:
    leaves = [*given[:3], *([given[4]] if prefixed else [])]
    weight = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("groups", "rows", "length", "prefix", "ragged"),
    [(1, 3, 40, 128, False), (2, 2, 130, 50, True), (2, 1, 9, 150, False)],
)
def test_flex_attention_equals_the_explicit_form(
    groups: int, rows: int, length: int, prefix: int, ragged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its gradients, which torch has for the uncompiled form on a CPU too, and hides there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    given = case(groups, rows, length, prefix)
    for prefixed in (True, False):
        lengths = given[5] if ragged else None
        whole, fused = attend(given, lengths, prefixed), by_flex(given, lengths, prefixed)
        assert fused.shape == whole.shape
        close(fused, whole)
        for one, other in zip(
            gradients(fused, given, prefixed), gradients(whole, given, prefixed), strict=True
        ):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
