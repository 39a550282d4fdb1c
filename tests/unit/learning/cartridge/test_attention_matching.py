"""Attention matching: exact with as many tokens as the document, no worse than its own values
with fewer, right in a case that is worked by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from twins import NEAR

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.attention_matching import (
    MOST_ROWS,
    ROW,
    ReferenceRows,
    attention_added,
    attention_matched,
    compacted,
    fitted,
    reference_rows,
    row_starts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


def logits_over(twin: Twin, samples: list[Sample], kv: Tensor) -> Tensor:
    packed = pack(samples, {"a": kv.shape[3]}, 40)
    return response_logits(twin.model, packed, [kv])


def test_as_many_tokens_as_the_document_are_the_document(
    twin: Twin, make_samples: MakeSamples
) -> None:
    kv = twin.kv["a"]
    made = attention_matched(twin.model, twin.documents["a"], kv, kv.shape[3], 1)
    torch.testing.assert_close(made, kv, rtol=0, atol=1e-4)  # scores in float32
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
    torch.testing.assert_close(hidden(moved, 10), hidden(kv, 24), rtol=0, atol=NEAR)
    assert not torch.allclose(hidden(kv, 10), hidden(kv, 24), atol=1e-2)


def outputs(kv: Tensor, rows: ReferenceRows, head: int) -> Tensor:
    """What two query heads that share a KV head read [R, 2, t, D], written the plain way."""
    found = []
    for queries, own in zip(rows.queries, rows.own, strict=True):
        keys, values = torch.cat([kv[:, head], own[:, head]], dim=1)
        t, prefix = queries.shape[1], kv.shape[2]
        scores = queries[2 * head : 2 * head + 2] @ keys.T
        later = torch.arange(prefix + t)[None] > prefix + torch.arange(t)[:, None]
        found.append(scores.masked_fill(later, -math.inf).softmax(-1) @ values)
    return torch.stack(found)


@pytest.mark.parametrize("tokens", [4, 8, 12])
def test_fitted_values_are_nearer_than_the_kept_tokens_own(twin: Twin, tokens: int) -> None:
    kv = twin.kv["a"]
    rows = reference_rows(twin.model, twin.documents["a"], kv)
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
                name: (outputs(prefix, seen, head) - outputs(kv[layer], seen, head)).square().sum()
                for name, prefix in (("fitted", made), ("own", own))
            }
            assert wrong["fitted"] < 0.99 * wrong["own"]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_rows_are_those_of_a_reading_behind_the_document_by_itself(twin: Twin) -> None:
    """700 tokens have eleven rows, of which four are one forward pass, and one pass is on each
    thread: each row is as if it were read alone, sees no other, and stands in its place."""
    ids = [i % 50 + 3 for i in range(700)]
    kv = document_kv(twin.model, ids)
    rows = reference_rows(twin.model, ids, kv)
    scale = twin.model.kv_shape[2] ** -0.5
    positions = torch.arange(700, 700 + ROW)
    assert len(row_starts(700)) == 11
    for i, start in enumerate(row_starts(700)):
        seen: list[tuple[Tensor, ...]] = []
        alone = FlatAttention(
            [ROW], [1], positions, [kv], observer=lambda _, *x, seen=seen: seen.append(x)
        )
        twin.model(torch.tensor(ids[start : start + ROW]), positions, alone)
        for (q, k, v, out), row in zip(seen, rows, strict=True):
            expected = (q * scale, k, v, out)
            found = (row.queries[i], *row.own[i], row.outputs[i])
            for ours, theirs in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, theirs.transpose(0, 1), rtol=0, atol=5e-5)
    for layer, row in zip(kv, rows, strict=True):
        for head in range(layer.shape[1]):
            read = row.outputs[:, 2 * head : 2 * head + 2]
            torch.testing.assert_close(read, outputs(layer, row, head), rtol=0, atol=5e-5)


def one_query() -> ReferenceRows:
    """Return a row of one token, with query log 2, key 1 and value 0, that has read a 6."""
    own = torch.tensor([[[[1.0]]], [[[0.0]]]]).double()
    query = torch.full((1, 1, 1, 1), math.log(2)).double()
    return ReferenceRows(query, own[None], torch.full_like(query, 6.0))


def test_two_tokens_in_one_by_hand() -> None:
    """Keys 0 (frozen), then twice the same; a query that scores them 0 and log 2 twice: weights
    1/7, 2/7, 2/7, and 2/7 for itself, at log 2. One is dropped: 1/5, 2/5, 2/5. Values 0, 7, 14,
    own 0: the output is 2 + 4 = 6, so the kept value is 6 * 5/2 = 15."""
    kv = torch.tensor([[[[0.0], [1.0], [1.0]]], [[[0.0], [7.0], [14.0]]]]).double()
    made = compacted(kv, one_query(), 2, 1)
    assert made[0].flatten().tolist() == [0, 1]
    assert made[1].flatten().tolist() == pytest.approx([0, 15], abs=0.01)


def test_every_part_of_a_long_document_is_represented() -> None:
    assert row_starts(40) == [0]
    assert row_starts(70) == [0, 6]
    assert row_starts(3 * ROW) == [0, ROW, 2 * ROW]
    many = row_starts(31 * 2 * ROW + ROW)
    assert len(many) == MOST_ROWS
    assert many == [2 * ROW * i for i in range(MOST_ROWS)]


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
    made = fitted(kv, one_query(), kv[:, :, :1], 1)
    assert made[0].flatten().tolist() == [1]
    assert made[1].flatten().tolist() == pytest.approx([15], abs=0.01)
