"""Attention that never has all its scores: chunks of queries, and FlexAttention uncompiled, against
the explicit form."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, gradients, progress_of, scene
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from learning.losses.objective import active_channels
from learning.model import attention, flex_attention
from learning.model.attention import PrefixContext, cartridge_attention, query_chunk
from learning.model.flex_attention import TOKENS, bucket
from learning.model.loading import load_model
from learning.step import train_step

if TYPE_CHECKING:
    from twins import Twin

    from learning.cartridge.bank import CartridgeBank
    from protocols.types import TrainStepOutput

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


def slopes(out: Tensor, given: tuple[Tensor, ...], prefixed: bool) -> list[Tensor]:
    leaves = [*given[:3], *([given[4]] if prefixed else [])]
    weight = torch.sin(torch.arange(out.numel(), dtype=out.dtype)).view(out.shape)
    return list(torch.autograd.grad((out * weight).sum(), leaves))


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 3), rows=st.integers(1, 3), length=st.integers(2, 12),
    prefix=st.integers(1, 9), queries=st.integers(1, 5), prefixed=st.booleans(),
    ragged=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunks_of_queries_equal_all_at_once(
    groups: int, rows: int, length: int, prefix: int, queries: int, prefixed: bool, ragged: bool,
    seed: int,
) -> None:  # fmt: skip
    given = case(groups, rows, length, prefix, seed=seed)
    lengths = given[5] if ragged else None
    whole = attend(given, lengths, prefixed)
    expected = slopes(whole, given, prefixed)
    with pytest.MonkeyPatch.context() as patch:
        seen = length + prefix * prefixed
        patch.setattr(attention, "SCORE_BYTES", 4 * groups * rows * 6 * seen * queries)
        assert query_chunk(groups * rows * 6, seen, attention.SCORE_BYTES) == queries
        parts = attend(given, lengths, prefixed)
        got = slopes(parts, given, prefixed)
    close(parts, whole)
    for one, other in zip(got, expected, strict=True):
        close(one, other)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that an operation inside of it made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.bytes = max([self.bytes, *made])
        return out


def test_no_tensor_is_larger_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the inputs are far smaller than the scores."""
    given = case(1, 2, 96, 200)
    scores = 4 * 2 * 6 * 96 * (96 + 200)
    with Largest() as explicit:
        slopes(attend(given, None, True), given, True)
    assert explicit.bytes == scores
    monkeypatch.setattr(attention, "SCORE_BYTES", scores // 10)
    with Largest() as chunked:
        slopes(attend(given, None, True), given, True)
    inputs = max(x.nbytes for x in given)
    assert max(inputs, scores // 20) <= chunked.bytes <= max(inputs, scores // 10)


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
    """500 steps of up to 8 rows of up to 2,048 tokens over one of two cartridges of 2,048."""
    shapes: set[tuple[int, ...]] = set()

    def recorded(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Any:
        shapes.add((*query.shape, *key.shape))
        return query, SimpleNamespace(lse=query[..., 0])

    monkeypatch.setattr(flex_attention, "flex_attention", recorded)
    draws, exact = random.Random("shapes"), set()
    blocks: flex_attention.Blocks = {"row": None, "prefix": None}
    kv = torch.zeros(1, 2, 2, 2048, 4)
    for _ in range(500):
        rows, length = draws.randint(1, 8), draws.randint(700, 2048)
        exact.add((rows, length))
        query, key = (torch.zeros(1).expand(rows, h, length, 4) for h in (4, 2))
        flex_attention.flex_attention_over(query, key, key, None, 1.0, kv, None, blocks)
    assert len(exact) > 450
    # By row: 8 counts of rows, 13 lengths. Over the prefix: tokens of all rows, to 16,384.
    assert len(shapes) <= 8 * 13 + 8 + 8 * 4 < flex_attention.SHAPES


def stepped(twin: Twin, bank: CartridgeBank, model: Any = None) -> TrainStepOutput:
    batch = scene(twin, bank_of(twin))
    return train_step(
        model or twin.model, bank, progress_of(bank, lr=0.01), batch, active_channels(ALL),
        clip=1.0, row_tokens=24, version=0, staleness=0,
    )  # fmt: skip


@pytest.mark.parametrize("recomputed", [False, True])
def test_a_step_in_chunks_is_the_step(
    llama: Twin, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = bank_of(llama), bank_of(llama)
    expected = stepped(llama, whole)
    monkeypatch.setattr(attention, "SCORE_BYTES", 4096)
    if recomputed:
        monkeypatch.setattr("learning.step.response_tokens", recomputing_layers)
    got = stepped(llama, parts)
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    ours, theirs = gradients(parts), gradients(whole)
    assert ours is not None
    assert theirs is not None
    close(ours, theirs)


def recomputing_layers(*given: Any, **named: Any) -> Any:
    from learning.packing import response_tokens

    return response_tokens(*given, **(named | {"recompute_layers": True}))


def test_a_base_in_bfloat16_trains_a_cartridge_in_float32(llama: Twin) -> None:
    """The step's numbers are those of a float32 base, as near as bfloat16 is (8 bits)."""
    ours, theirs = bank_of(llama), bank_of(llama)
    half = load_model(str(llama.path), "bfloat16")
    assert half.dtype == torch.bfloat16
    got, expected = stepped(llama, ours, half), stepped(llama, theirs)
    gradient, exact = gradients(ours), gradients(theirs)
    assert gradient is not None
    assert exact is not None
    held = (*ours.trainable.values(), *ours.frozen.values(), gradient)
    assert {x.dtype for x in held} == {torch.float32}
    assert got.kl == pytest.approx(expected.kl, rel=0.05)
    cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), exact.flatten(), dim=0)
    assert cosine > 0.98
    assert got.grad_norm == pytest.approx(expected.grad_norm, rel=0.1)
