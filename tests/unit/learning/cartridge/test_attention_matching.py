"""Attention matching: exact with as many tokens as the document, no worse than its own values
with fewer, right in a case that is worked by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from learning.cartridge.attention_matching import (
    MOST_ROWS,
    ROW,
    ObservedAttention,
    attention_added,
    attention_matched,
    compacted,
    fitted,
    observe,
    reference_rows,
)
from learning.cartridge.composition import shifted
from learning.model.attention import FlatAttention
from learning.packing import pack, response_logits

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from protocols.types import Sample

    MakeSamples = Callable[..., list[Sample]]


def logits_over(twin: Twin, samples: list[Sample], kv: Tensor) -> Tensor:
    packed = pack(samples, {"a": kv.shape[3]}, 40)
    return response_logits(twin.model, packed, [kv])


def test_as_many_tokens_as_the_document_are_the_document(
    twin: Twin, make_samples: MakeSamples
) -> None:
    kv = twin.kv["a"]
    made = attention_matched(twin.model, twin.documents["a"], kv, kv.shape[3], 1)
    torch.testing.assert_close(made, kv, rtol=0, atol=2e-5)  # scores in float32
    samples = make_samples(("a", 4, 6), ("a", 2, 3))
    expected = torch.cat([twin.response_logits(s, kv) for s in samples])
    torch.testing.assert_close(logits_over(twin, samples, made), expected, rtol=0, atol=5e-5)


def test_a_request_sees_the_kept_keys_as_if_it_stood_behind_the_document(twin: Twin) -> None:
    """The first 10 of 24 tokens, moved by 10 - 24, before a request at 10: equal to a request at 24
    that sees those 10 alone."""
    kv, ids = twin.kv["a"][:, :, :, :10], torch.tensor([5, 9, 31])

    def hidden(prefix: Tensor, first: int) -> Tensor:
        positions = torch.arange(first, first + 3)
        return twin.model(ids, positions, FlatAttention([3], [1], positions, [prefix]))

    moved = shifted(kv, 10 - 24, twin.model.frequencies())
    torch.testing.assert_close(hidden(moved, 10), hidden(kv, 24), rtol=0, atol=2e-5)
    assert not torch.allclose(hidden(kv, 10), hidden(kv, 24), atol=1e-2)


def outputs(kv: Tensor, row: ObservedAttention, head: int) -> Tensor:
    """What two query heads that share a KV head read [2, t, D], written the plain way."""
    keys, values = torch.cat([kv[:, head], row.own[:, head]], dim=1)
    t, prefix = row.queries.shape[1], kv.shape[2]
    scores = row.queries[2 * head : 2 * head + 2] @ keys.T
    later = torch.arange(prefix + t)[None] > prefix + torch.arange(t)[:, None]
    return scores.masked_fill(later, -math.inf).softmax(-1) @ values


@pytest.mark.parametrize("tokens", [4, 8, 12])
def test_fitted_values_are_nearer_than_the_kept_tokens_own(twin: Twin, tokens: int) -> None:
    kv = twin.kv["a"]
    rows = observe(twin.model, reference_rows(twin.documents["a"]), kv)
    for layer in range(len(kv)):
        seen = rows[layer]
        made = compacted(kv[layer], seen, tokens, 1)
        for head in range(kv.shape[2]):
            kept = [int((kv[layer, 0, head] - key).abs().sum(-1).argmin()) for key in made[0, head]]
            assert kept == sorted(set(kept)), "keys are the document's, in order"
            assert kept[0] == 0
            assert torch.equal(made[:, head, 0], kv[layer, :, head, 0]), "frozen, as it was"
            own = kv[layer][:, :, kept]
            wrong = {
                name: sum(
                    (outputs(prefix, row, head) - outputs(kv[layer], row, head)).square().sum()
                    for row in seen
                )
                for name, prefix in (("fitted", made), ("own", own))
            }
            assert wrong["fitted"] < 0.99 * wrong["own"]


def test_rows_that_are_read_together_see_no_other_row(twin: Twin) -> None:
    """Eleven rows of unequal lengths, of which eight are one forward pass, as each by itself."""
    kv, ids = twin.kv["a"], twin.documents["a"]
    rows = [ids[i : i + 1 + i % 4] for i in range(11)]
    together = observe(twin.model, rows, kv)
    assert [len(layer) for layer in together] == [11] * len(kv)
    for i, row in enumerate(rows):
        alone = observe(twin.model, [row], kv)
        for layer, (ours,) in zip(together, alone, strict=True):
            assert ours.queries.shape[1] == len(row)
            torch.testing.assert_close(layer[i].queries, ours.queries, rtol=0, atol=2e-5)
            torch.testing.assert_close(layer[i].own, ours.own, rtol=0, atol=2e-5)


def test_two_tokens_in_one_by_hand() -> None:
    """Keys 0 (frozen), then twice the same; a query that scores them 0 and log 2 twice: weights
    1/7, 2/7, 2/7, and 2/7 for itself, at log 2. One is dropped: 1/5, 2/5, 2/5. Values 0, 7, 14,
    own 0: the output is 2 + 4 = 6, so the kept value is 6 * 5/2 = 15."""
    kv = torch.tensor([[[[0.0], [1.0], [1.0]]], [[[0.0], [7.0], [14.0]]]]).double()
    row = ObservedAttention(
        torch.full((1, 1, 1), math.log(2)).double(), torch.tensor([[[[1.0]]], [[[0.0]]]])
    )
    made = compacted(kv, [row], 2, 1)
    assert made[0].flatten().tolist() == [0, 1]
    assert made[1].flatten().tolist() == pytest.approx([0, 15], abs=0.01)


def test_every_part_of_a_long_document_is_represented() -> None:
    ids = range(3 * MOST_ROWS * ROW)
    rows = reference_rows(ids)
    assert len(rows) == MOST_ROWS
    assert [row[0] for row in rows[:3]] == [0, 3 * ROW, 6 * ROW]
    assert reference_rows(range(70))[1] == range(64, 70)


def test_the_rest_of_a_document_beside_its_beginning_is_the_document(
    twin: Twin, make_samples: MakeSamples
) -> None:
    """A cartridge of the first 10 of 24 tokens with 14 added: every key of the document twice, or
    once, so its outputs are the document's."""
    kv = twin.kv["a"]
    given = kv[:, :, :, :10]
    added = attention_added(twin.model, twin.documents["a"], kv, given, 14)
    assert added.shape[3] == 14
    both = torch.cat([given, added], dim=3)
    samples = make_samples(("a", 4, 6), ("a", 2, 3))
    expected = torch.cat([twin.response_logits(s, kv) for s in samples])

    def wrong(prefix: Tensor) -> float:
        return (logits_over(twin, samples, prefix) - expected).square().mean().item()

    moved = shifted(given, 14, twin.model.frequencies())  # the cartridge alone, a prompt at 24
    assert wrong(both) < 0.5 * wrong(moved)


def test_an_added_token_by_hand() -> None:
    """As above, with the cartridge's one token in place of the frozen one: key 0, value 0. Nothing
    of the document is left out but token 2, so the added value is 15 again, where token 0 of the
    document has the weight of the cartridge's own."""
    kv = torch.tensor([[[[0.0], [1.0], [1.0]]], [[[0.0], [7.0], [14.0]]]]).double()
    row = ObservedAttention(
        torch.full((1, 1, 1), math.log(2)).double(), torch.tensor([[[[1.0]]], [[[0.0]]]])
    )
    made = fitted(kv, [row], 1, kv[:, :, :1])
    assert made[0].flatten().tolist() == [1]
    assert made[1].flatten().tolist() == pytest.approx([15], abs=0.01)
