"""Test the closed-form re-fit of a cartridge to an edited document."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cartridge_forge.learning.attention import AttentionOptions
from cartridge_forge.learning.batch import pack, response_logits
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.attention_matching import HeadQueries, attention_matched
from cartridge_forge.plugins.library.reference_rows import ReferenceRow, document_rows
from cartridge_forge.plugins.library.refit import (
    CHANGED_WEIGHT,
    GATE,
    VALUE_RIDGE,
    DocumentEdit,
    gate,
    mass_ratios,
    refitted,
    refitted_head,
)
from cartridge_forge.protocols.step import Sample

if TYPE_CHECKING:
    from twins import Twin

TOKENS, FROZEN = 8, 1


def edit_of(twin: Twin, places: tuple[int, ...]) -> tuple[DocumentEdit, tuple[int, ...]]:
    """The document with other tokens at these places, read in its own rows and around them."""
    old = twin.documents["a"]
    ids = tuple((t + 11) % 60 if i in places else t for i, t in enumerate(old))
    around = [ReferenceRow(tuple(ids[max(0, i - 4) : i + 4])) for i in places]
    rows = [*document_rows(ids), *around]
    kv = document_kv(twin.model, ids)
    return DocumentEdit(twin.kv["a"], kv, places, rows), ids


def test_an_edit_that_changes_nothing_changes_no_number(twin: Twin) -> None:
    before = attention_matched(twin.model, twin.documents["a"], twin.kv["a"], TOKENS, FROZEN)
    edit, _ = edit_of(twin, ())
    torch.testing.assert_close(
        refitted(twin.model, before, FROZEN, edit), before, rtol=0, atol=1e-4
    )


def test_the_changed_words_are_nearer_to_the_new_document(twin: Twin) -> None:
    before = attention_matched(twin.model, twin.documents["a"], twin.kv["a"], TOKENS, FROZEN)
    edit, ids = edit_of(twin, (14, 15))
    after = refitted(twin.model, before, FROZEN, edit)
    assert torch.equal(after[:, :, :, :FROZEN], before[:, :, :, :FROZEN])

    def missed(kv: Tensor) -> float:
        sample = Sample("s", "a", ids[10:14], ids[14:18], (), ())
        over, document = (
            response_logits(twin.model, pack([sample], {"a": one.shape[3]}, 40), [one])
            for one in (kv, edit.new)
        )
        return (over - document).square().mean().item()

    assert missed(after) < missed(before)


def test_a_token_moves_halfway_where_the_edit_changes_a_tenth_of_its_square() -> None:
    new = torch.tensor([[3.0, 4.0], [3.0, 4.0], [0.0, 0.0]])
    assert GATE == 0.1
    changes = torch.tensor([2.5, 0.0, 0.0])
    torch.testing.assert_close(gate(changes, new), torch.tensor([0.5, 0.0, 0.0]))


def head_of(keys: Tensor, queries: Tensor, targets: Tensor) -> HeadQueries:
    """Queries that see no rows of their own, at positions behind keys and cartridge."""
    n, size = queries.shape
    at = torch.full((n,), len(keys))
    return HeadQueries(
        queries, torch.full((n,), -1e4), torch.zeros(n, size), targets, at, at,
        AttentionOptions(1.0),
    )  # fmt: skip


def test_a_bias_is_the_log_ratio_of_the_masses() -> None:
    """Entries equal to the document's keys have its mass: ratio 0; of two equal entries each has
    half the mass of both, so that with one left out ln(1/2) is asked for."""
    draws = torch.Generator().manual_seed(1)
    keys, queries = torch.randn(5, 3, generator=draws), torch.randn(7, 3, generator=draws)
    head = head_of(keys, queries, torch.zeros(7, 3))
    sums = (queries @ keys.T).logsumexp(-1)
    every = torch.ones(5, dtype=torch.bool)
    weights = torch.rand(7, generator=draws)
    ratios = mass_ratios(head, weights, keys, sums, keys, every)
    torch.testing.assert_close(ratios, torch.zeros(5), rtol=0, atol=1e-5)
    twice = torch.cat([keys, keys])
    first = torch.arange(10) < 5
    ratios = mass_ratios(head, weights, twice, sums + math.log(2), twice, first)
    torch.testing.assert_close(ratios, torch.full((10,), -math.log(2)), rtol=0, atol=1e-5)


def test_values_are_the_ridge_solution_of_a_reference_in_float64() -> None:
    draws = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws)

    before, queries, targets = drawn(2, 6, 4), drawn(20, 4), drawn(20, 4)
    changes = torch.rand(20, generator=draws)
    head = head_of(before[0], queries, targets)
    none = torch.zeros(0, dtype=torch.long)
    made = refitted_head(head, changes, before, none, before, drawn(4), 1, 0).double()
    assert torch.equal(made[0], before[0].double())
    shares = (queries.double() @ before[0].double().T).softmax(-1)
    missing = targets.double() - shares @ before[1].double()
    weights = 1 / 20 + CHANGED_WEIGHT * changes.double() / changes.double().sum()
    of_trained = shares[:, 1:]
    gram = of_trained.T @ (weights[:, None] * of_trained)
    ridge = VALUE_RIDGE * gram.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    moved = torch.linalg.solve(gram + ridge, of_trained.T @ (weights[:, None] * missing))
    torch.testing.assert_close(made[1, 1:], before[1, 1:].double() + moved, rtol=1e-4, atol=1e-4)
    assert torch.equal(made[1, 0], before[1, 0].double())
