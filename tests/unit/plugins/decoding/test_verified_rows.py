"""Blocks read over documents: logits against plain transformers, and passes that are made again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from twins import NEAR, VOCAB

from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.decoding.verified.records import VerifyCall, VerifyRow
from cartridge_forge.plugins.decoding.verified.rows import VerifiedRows
from cartridge_forge.plugins.decoding.verified.rules import Verdict
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sampling

if TYPE_CHECKING:
    from torch import Tensor
    from twins import Twin

ROOM = 2**24  # bytes: of many groups
GREEDY = Sampling(temperature=0.0)
PROMPTS = {"a": (5, 9, 11), "b": (7, 3), "c": (4, 8, 15, 16, 23)}


def likeliest(twin: Twin, name: str, ids: tuple[int, ...]) -> list[int]:
    """The likeliest token of plain transformers after each of the ids."""
    return twin.logits(ids, twin.kv[name]).argmax(-1).tolist()


def row(
    name: str, response: tuple[int, ...], block: tuple[int, ...] | None,
    reads: Sequence[tuple[int, int]] = (),
) -> VerifyRow:  # fmt: skip
    prompt = PROMPTS[name]
    return VerifyRow(
        (name,), (*prompt, *response), len(response), block, 17, tuple(reads), len(prompt) + 12
    )


def greedy(*rows: VerifyRow) -> VerifyCall:
    return VerifyCall("group", "exact", 0.05, GREEDY, rows)


def verdicts(rows: VerifiedRows, twin: Twin, call: VerifyCall) -> tuple[list[Verdict], int]:
    """Verify greedily: the student's logits do not matter."""
    count = sum(len(r.block or ()) for r in call.rows)
    student = torch.zeros(count, VOCAB)
    return rows.verify(call, lambda n: document_kv(twin.model, twin.documents[n]), student)


def test_blocks_of_several_documents_are_judged_as_by_plain_transformers(twin: Twin) -> None:
    """Of "a" a wholly right block, of "b" one that is wrong at its second token, of "c" an empty
    one; then a second pass over what the first one left."""
    right: list[int] = []
    for _ in range(4):
        right.append(likeliest(twin, "a", (*PROMPTS["a"], *right))[-1])
    first = likeliest(twin, "b", PROMPTS["b"])[-1]
    wrong = (likeliest(twin, "b", (*PROMPTS["b"], first))[-1] + 1) % 90
    rows = VerifiedRows(twin.model, ROOM)
    begin = greedy(row("a", (), tuple(right)), row("b", (), (first, wrong, 6)), row("c", (), ()))
    found, repeated = verdicts(rows, twin, begin)
    further = likeliest(twin, "a", (*PROMPTS["a"], *right))[-1]
    mended = likeliest(twin, "b", (*PROMPTS["b"], first))[-1]
    begun = likeliest(twin, "c", PROMPTS["c"])[-1]
    assert found == [Verdict(4, further), Verdict(1, mended), Verdict(0, begun)]
    assert repeated == 0

    responses = ((*right, further), (first, mended), (begun,))
    reads = ([(0, 7)], [(0, 5)], [(0, 5)])
    blocks = ((1, 2), (3,), None)
    later = greedy(*map(row, "abc", responses, blocks, reads))
    assert [r.next_read for r in later.rows[:2]] == [(7, 10), (3, 5)]
    found, repeated = verdicts(rows, twin, later)
    expected = []
    for name, response, block in zip("ab", responses, ((1, 2), (3,)), strict=False):
        best = likeliest(twin, name, (*PROMPTS[name], *response, *block))[-len(block) - 1 :]
        kept = next((i for i, t in enumerate(block) if t != best[i]), len(block))
        expected.append(Verdict(kept, best[kept]))
    assert found == expected
    assert repeated == 0
    # Another replica, which holds nothing, makes the first pass again.
    assert verdicts(VerifiedRows(twin.model, ROOM), twin, later) == (expected, 1)


def logits_of(rows: VerifiedRows, twin: Twin, call: VerifyCall) -> Tensor:
    """The teacher's logits of a call, as the rules get them."""
    seen: list[Tensor] = []
    logits = rows._logits

    def kept(hidden: Tensor) -> Tensor:
        seen.append(logits(hidden))
        return seen[-1]

    rows._logits = kept  # type: ignore[method-assign]  # to look at its result
    verdicts(rows, twin, call)
    rows._logits = logits  # type: ignore[method-assign]  # as before
    return seen[-1]


def test_a_replica_that_makes_the_passes_again_has_the_same_bits(twin: Twin) -> None:
    """Three passes, in which one row ends and tokens are refused."""
    calls = [
        greedy(row("a", (), (1, 2, 3)), row("b", (), (4, 5, 6)), row("c", (), (7, 8, 9))),
        greedy(
            row("a", (1, 20), (2, 3), [(0, 6)]), row("b", (30,), (4, 5), [(0, 5)]),
            row("c", (7, 2), None, [(0, 8)]),
        ),
        greedy(
            row("a", (1, 20, 2, 9), (3,), [(0, 6), (4, 7)]),
            row("b", (30, 4, 5, 8), (6,), [(0, 5), (2, 5)]), row("c", (7, 2), None, [(0, 8)]),
        ),
    ]  # fmt: skip
    held = VerifiedRows(twin.model, ROOM)
    each = [logits_of(held, twin, call) for call in calls]
    assert held.held_bytes > 0
    anew = logits_of(VerifiedRows(twin.model, ROOM), twin, calls[-1])
    assert torch.equal(each[-1], anew)
    # A group larger than the room is never held, and has the same bits too.
    none = VerifiedRows(twin.model, 1)
    assert torch.equal(each[-1], logits_of(none, twin, calls[-1]))
    assert none.held_bytes == 0
    for call, logits in zip(calls, each, strict=True):
        plain = torch.cat(
            [
                twin.logits((*r.tokens, *r.block), twin.kv[r.contexts[0]])[-len(r.block) - 1 :]
                for r in call.rows
                if r.block is not None
            ]
        )
        assert (logits - plain[:, : logits.shape[1]]).abs().max() < NEAR


def test_the_groups_used_last_are_held_in_the_room(twin: Twin) -> None:
    rows = VerifiedRows(twin.model, ROOM)
    call = greedy(row("a", (), (1,)))
    verdicts(rows, twin, call)
    one = rows.held_bytes
    rows = VerifiedRows(twin.model, 2 * one)
    for name in "xyz":
        verdicts(rows, twin, replace(call, group=name))
        assert rows.held_bytes <= 2 * one
    later = greedy(row("a", (1,), (2,), [(0, 4)]))
    assert verdicts(rows, twin, replace(later, group="z"))[1] == 0
    assert verdicts(rows, twin, replace(later, group="x"))[1] == 1  # the oldest was dropped


def test_a_row_that_does_not_fit_is_an_error_with_the_group(twin: Twin) -> None:
    rows = VerifiedRows(twin.model, ROOM)
    with pytest.raises(DataError, match="group has the token id 97 at 3"):
        verdicts(rows, twin, greedy(row("a", (), (97,))))
    with pytest.raises(DataError, match="a row of group has 3 tokens and a block of 13"):
        verdicts(rows, twin, greedy(row("a", (), (1,) * 13)))
    with pytest.raises(DataError, match="without the student's logits"):
        rows.verify(
            greedy(row("a", (), (1,))), lambda n: document_kv(twin.model, twin.documents[n]), None
        )
