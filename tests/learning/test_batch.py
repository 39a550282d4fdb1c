"""Batches: what is cut where, and where each channel's tokens stand."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.batch import Batch, places, split
from learning.losses import Teacher
from protocols.channels import PreferencePair, RLSample, SDPOItem
from protocols.types import Sample, Sampling


def sample(name: str, prompt: int, response: int) -> Sample:
    return Sample(name, "a", (1,) * prompt, (2,) * response, (0.0,) * response, (0,) * response)


def episode(name: str, prompt: int, marks: str) -> RLSample:
    """`marks` has an o for each token of the student's own and an x for a tool's."""
    own = tuple(m == "o" for m in marks)
    return RLSample(sample(name, prompt, len(marks)), own, Sampling(), "g", 1.0)


# Two documents' samples of 2 and 1 tokens, two episodes of 4 and 3, a pair of 2 and 1.
BATCH = Batch(
    doc=[sample("d0", 3, 2), sample("d1", 1, 1)],
    doc_teacher=Teacher(None, torch.arange(3)[:, None], torch.arange(3.0)[:, None]),
    rl=[episode("e0", 2, "oxoo"), episode("e1", 1, "oxo")],
    old=torch.arange(7.0),
    ref=torch.arange(7.0) + 10,
    distill=torch.arange(7.0) + 20,
    sdpo=[SDPOItem("e1", 2, 3, (1,)), SDPOItem("e0", 2, 4, (1,))],
    sdpo_teacher=Teacher(logits=torch.tensor([[12.0], [2.0], [3.0]])),
    pairs=[PreferencePair("p", "a", (1, 1), (2, 2), (2,), 0.0, 0.0, 0)],
)


def test_where_everything_stands() -> None:
    where = places(BATCH, {"e0"})
    assert [s.id for s in where.texts] == ["d0", "d1", "e0", "e1", "p/chosen", "p/rejected"]
    # d0 2, d1 1 | e0: o x o o | e1: its hinted turn alone, for it has no advantage | 2 and 1
    assert where.needed.int().tolist() == [1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1]
    assert where.doc == 3
    assert (where.policy.tolist(), where.lengths) == ([3, 4, 5], [3])
    assert where.policy_in_rl.tolist() == [0, 2, 3]
    assert where.turns.tolist() == [6, 4, 5]  # item by item: e1's, then e0's
    assert where.turns_in_rl.tolist() == [6, 2, 3]
    assert where.pairs == 7
    both = places(BATCH, {"e0", "e1"})
    assert (both.policy.tolist(), both.lengths) == ([3, 4, 5, 6, 7], [3, 2])
    assert both.pairs == 8


def test_documents_alone() -> None:
    where = places(Batch(doc=BATCH.doc, doc_teacher=BATCH.doc_teacher), {})
    assert where.needed.tolist() == [True] * 3
    assert where.doc == where.pairs == 3
    assert where.policy.tolist() == where.turns.tolist() == where.lengths == []


def test_what_belongs_to_a_sample_goes_with_it() -> None:
    some = BATCH.take([1], [1], [])
    assert [s.id for s in some.doc] == ["d1"]
    assert some.doc_teacher is not None
    assert some.doc_teacher.indices is not None
    assert some.doc_teacher.indices.tolist() == [[2]]
    assert [r.sample.id for r in some.rl] == ["e1"]
    for of_rl, start in ((some.old, 4), (some.ref, 14), (some.distill, 24)):
        assert of_rl is not None
        assert of_rl.tolist() == [start, start + 1, start + 2]
    assert some.sdpo == [BATCH.sdpo[0]]
    assert some.sdpo_teacher is not None
    assert some.sdpo_teacher.logits is not None
    assert some.sdpo_teacher.logits.tolist() == [[12]]
    assert some.pairs == []
    nothing = replace(BATCH, old=None, ref=None, distill=None, doc_teacher=None).take([], [], [0])
    assert nothing.old is nothing.ref is nothing.distill is nothing.doc_teacher is None
    assert nothing.pairs == BATCH.pairs


def names(parts: list[Batch]) -> list[list[str]]:
    return [[s.id for s in (*p.doc, *(r.sample for r in p.rl), *p.pairs)] for p in parts]


def test_micro_batches_by_hand() -> None:
    """Lengths 5, 2 | 6, 4 | 4 + 3."""
    assert split(BATCH, None) == [BATCH]
    assert split(BATCH, 24) == [BATCH]
    assert names(split(BATCH, 23)) == [["d0", "d1", "e0", "e1"], ["p"]]
    assert names(split(BATCH, 7)) == [["d0", "d1"], ["e0"], ["e1"], ["p"]]
    assert names(split(BATCH, 1)) == [["d0"], ["d1"], ["e0"], ["e1"], ["p"]]
    assert split(Batch(), None) == split(Batch(), 5) == []


def test_ranks_by_hand() -> None:
    """Lengths 7 (the pair), 6, 5, 4, 2 in turn to 0, 1, 1, 0 and, both at 11, to 0; of three
    ranks to 0, 1, 2, 2 and 1. Within a rank they keep their order."""
    shares = [names(split(BATCH, None, rank, 2)) for rank in range(2)]
    assert shares == [[["d1", "e1", "p"]], [["d0", "e0"]]]
    shares = [names(split(BATCH, None, rank, 3)) for rank in range(3)]
    assert shares == [[["p"]], [["d1", "e0"]], [["d0", "e1"]]]
    assert names(split(BATCH, None, 5, 6)) == []
    assert split(BATCH, None, 5, 6, even=True) == [Batch()]
    evened = [names(split(BATCH, 11, rank, 2, even=True)) for rank in range(2)]
    assert evened == [[["d1", "e1"], ["p"]], [["d0", "e0"], []]]
    assert split(Batch(), None, 1, 2, even=True) == []


@settings(max_examples=30, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    world=st.integers(1, 5),
    micro_tokens=st.one_of(st.none(), st.integers(1, 30)),
)
def test_ranks_divide_a_batch_evenly_and_lose_nothing(
    shapes: list[tuple[int, int]], world: int, micro_tokens: int | None
) -> None:
    """As evenly as any unit's length allows: what the fullest rank holds more than the emptiest is
    no more than its shortest unit, for that one went to the then emptiest."""
    batch = Batch(doc=[sample(f"d{i}", *shape) for i, shape in enumerate(shapes)])
    shares = [split(batch, micro_tokens, rank, world) for rank in range(world)]
    held = [name for parts in shares for part in names(parts) for name in part]
    assert sorted(held) == sorted(s.id for s in batch.doc)
    lengths = [
        [len(s.prompt_ids) + len(s.response_ids) for p in parts for s in p.doc] for parts in shares
    ]
    fullest = max(lengths, key=sum)
    assert sum(fullest) - min(map(sum, lengths)) <= min(fullest, default=0)
    evened = [split(batch, micro_tokens, rank, world, even=True) for rank in range(world)]
    assert len({len(parts) for parts in evened}) == 1
    assert [[p for p in parts if p.texts] for parts in evened] == shares


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30))
def test_nothing_is_lost_or_moved(micro_tokens: int) -> None:
    parts = split(BATCH, micro_tokens)
    assert [name for part in names(parts) for name in part] == ["d0", "d1", "e0", "e1", "p"]
    assert torch.cat([p.old for p in parts if p.old is not None]).tolist() == list(range(7))
    turns = {}
    for part in parts:
        assert part.sdpo_teacher is not None
        assert part.sdpo_teacher.logits is not None
        pieces = part.sdpo_teacher.logits[:, 0].split([i.tokens for i in part.sdpo] or [0])
        turns |= {i.sample: p.tolist() for i, p in zip(part.sdpo, pieces, strict=False)}
        assert {i.sample for i in part.sdpo} <= {r.sample.id for r in part.rl}
    assert turns == {"e1": [12.0], "e0": [2.0, 3.0]}
