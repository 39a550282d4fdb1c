"""Prefix attention against the formula written out, and against transformers' own cache."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from learning.cartridge.composition import stack_prefixes
from learning.model import document_kv as reading
from learning.model.attention import (
    DecodeCache,
    PrefixContext,
    cartridge_attention,
    hidden_states,
    kv_shape,
)
from learning.model.document_kv import document_kv
from learning.packing import pack, response_logits

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from protocols.types import Sample


def causal(length: int) -> Tensor:
    return torch.ones(1, 1, length, length, dtype=torch.bool).tril()


def logits_of(twin: Twin, ids: Tensor, prefixes: list[Tensor]) -> Tensor:
    """Ours [C*R, T, V], R rows for each prefix in turn, positions from where each prefix ends."""
    kv, lengths = stack_prefixes(prefixes)
    rows = len(ids) // len(prefixes)
    starts = torch.tensor([p.shape[3] for p in prefixes]).repeat_interleave(rows)
    positions = starts[:, None] + torch.arange(ids.shape[1])
    context = PrefixContext(kv=kv, lengths=lengths)
    hidden = hidden_states(twin.model, ids, positions, causal(ids.shape[1]), context)
    return twin.model.lm_head(hidden)


def written_out(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, kv: Tensor, lengths: list[int]
) -> Tensor:
    """The same attention, one query at a time over its own list of keys."""
    rows, heads, tokens, size = query.shape
    shared = heads // key.shape[1]
    per = rows // len(kv)
    out = torch.zeros(rows, tokens, heads, size, dtype=query.dtype)
    for b in range(rows):
        for h in range(heads):
            own, c = h // shared, b // per
            for t in range(tokens):
                visible = seen[b, 0, t]
                keys = torch.cat([kv[c, 0, own, : lengths[c]], key[b, own, visible]])
                values = torch.cat([kv[c, 1, own, : lengths[c]], value[b, own, visible]])
                out[b, t, h] = (keys @ query[b, h, t] / size**0.5).softmax(0) @ values
    return out


@settings(max_examples=25, deadline=None)
@given(
    prefixes=st.integers(1, 3),
    rows=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    shared=st.integers(1, 3),
    tokens=st.integers(1, 4),
    prefix_tokens=st.integers(1, 5),
    data=st.data(),
)
def test_attention_equals_the_formula_written_out(
    prefixes: int,
    rows: int,
    kv_heads: int,
    shared: int,
    tokens: int,
    prefix_tokens: int,
    data: st.DataObject,
) -> None:
    lengths = data.draw(
        st.lists(st.integers(1, prefix_tokens), min_size=prefixes, max_size=prefixes)
    )
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    size, batch = 4, prefixes * rows

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    # As transformers hands them over: heads are a transposed view of the projection.
    query = normal(batch, tokens, kv_heads * shared, size).transpose(1, 2)
    key, value = (normal(batch, tokens, kv_heads, size).transpose(1, 2) for _ in range(2))
    kv = normal(prefixes, 2, 2, kv_heads, prefix_tokens, size)  # two layers; the second is read
    seen = torch.rand(batch, 1, tokens, tokens, generator=random) < 0.5
    seen |= torch.eye(tokens, dtype=torch.bool)
    out, _ = cartridge_attention(
        SimpleNamespace(layer_idx=1),
        query,
        key,
        value,
        seen,
        size**-0.5,
        PrefixContext(kv=kv, lengths=torch.tensor(lengths)),
    )
    expected = written_out(query, key, value, seen, kv[:, 1], lengths)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("names", ["a", "ab", "cab"])
def test_logits_equal_transformers_with_the_same_past(twin: Twin, names: str, rows: int) -> None:
    ids = torch.randint(3, 97, (len(names) * rows, 6), generator=torch.Generator().manual_seed(5))
    ours = logits_of(twin, ids, [twin.kv[name] for name in names])
    for b, row in enumerate(ids.tolist()):
        expected = twin.logits(row, twin.kv[names[b // rows]])
        torch.testing.assert_close(ours[b], expected, rtol=0, atol=2e-5)


def test_a_prefix_that_no_tokens_could_make_is_read_as_it_is(twin: Twin) -> None:
    """A trained cartridge is no text's KV any more."""
    random = torch.Generator().manual_seed(3)
    prefixes = [torch.randn(twin.kv["a"].shape, generator=random) for _ in range(2)]
    ids = torch.randint(3, 97, (4, 5), generator=random)
    ours = logits_of(twin, ids, prefixes)
    for b, row in enumerate(ids.tolist()):
        expected = twin.logits(row, prefixes[b // 2])
        torch.testing.assert_close(ours[b], expected, rtol=0, atol=2e-5)


def test_without_a_prefix_the_model_is_the_plain_one(twin: Twin) -> None:
    ids = torch.tensor([twin.documents["a"]])
    positions = torch.arange(ids.shape[1])[None]
    hidden = hidden_states(twin.model, ids, positions, causal(ids.shape[1]), PrefixContext())
    torch.testing.assert_close(
        twin.model.lm_head(hidden)[0], twin.logits(twin.documents["a"]), rtol=0, atol=2e-5
    )


def test_the_prefix_is_seen_and_its_order_of_groups_matters(llama: Twin) -> None:
    ids = torch.randint(3, 97, (2, 4), generator=torch.Generator().manual_seed(2))
    ab = logits_of(llama, ids, [llama.kv["a"], llama.kv["b"]])
    ba = logits_of(llama, ids, [llama.kv["b"], llama.kv["a"]])
    assert (ab - ba).abs().amax() > 0.1


def test_garbage_in_prefix_padding_changes_no_bit(twin: Twin) -> None:
    names = ["b", "c"]
    kv, lengths = stack_prefixes([twin.kv[n] for n in names])
    assert lengths is not None
    assert lengths.tolist() == [17, 31]
    ids = torch.randint(3, 97, (4, 5), generator=torch.Generator().manual_seed(4))
    positions = lengths.repeat_interleave(2)[:, None] + torch.arange(5)
    dirty = kv.clone()
    dirty[0, ..., 17:, :] = 1e4

    def run(prefix: Tensor) -> Tensor:
        context = PrefixContext(kv=prefix, lengths=lengths)
        return hidden_states(twin.model, ids, positions, causal(5), context)

    assert torch.equal(run(kv), run(dirty))


def test_garbage_in_row_padding_changes_no_bit(
    twin: Twin, make_samples: Callable[..., list[Sample]]
) -> None:
    samples = make_samples(("a", 4, 3), ("a", 2, 2), ("b", 2, 1), ("b", 5, 4), ("b", 3, 3))
    packed = pack(samples, {"a": 24, "b": 17}, row_tokens=9)
    kv, lengths = stack_prefixes([twin.kv["a"], twin.kv["b"]])
    padding = packed.segments == -1
    assert padding.sum() == 9 + 9 - (7 + 4) + 9 + 9 - (3 + 9 + 6)
    dirty = replace(
        packed,
        ids=packed.ids.masked_fill(padding, 96),
        positions=packed.positions.masked_fill(padding, 400),
    )
    clean = response_logits(twin.model, packed, kv, lengths)
    assert torch.equal(clean, response_logits(twin.model, dirty, kv, lengths))


@pytest.mark.parametrize("chunk", [1, 5, 8, 24, 512])
def test_a_document_read_in_chunks_equals_transformers_cache(
    twin: Twin, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "PREFILL_CHUNK", chunk)
    kv = document_kv(twin.model, twin.documents["a"])
    torch.testing.assert_close(kv, twin.kv["a"], rtol=0, atol=2e-5)


def test_token_by_token_with_a_cache_equals_one_pass(twin: Twin) -> None:
    ids = torch.randint(3, 97, (2, 6), generator=torch.Generator().manual_seed(6))
    prefixes = [twin.kv["a"], twin.kv["b"]]
    kv, lengths = stack_prefixes(prefixes)
    layers, heads, _ = kv_shape(twin.model)
    cache = DecodeCache.empty(kv, layers, 2, heads, 6)
    context = PrefixContext(kv=kv, lengths=lengths, cache=cache)
    steps = []
    for t in range(6):
        positions = torch.tensor([[24 + t], [17 + t]])
        mask = torch.ones(1, 1, 1, t + 1, dtype=torch.bool)
        steps.append(hidden_states(twin.model, ids[:, t : t + 1], positions, mask, context))
        cache.used += 1
    ours = twin.model.lm_head(torch.cat(steps, dim=1))
    torch.testing.assert_close(ours, logits_of(twin, ids, prefixes), rtol=0, atol=2e-5)
