"""Batches: what is cut where, and where each channel's tokens stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learning.batch import Member, MicroBatch, PreparedBatch, pack, prepare
from learning.losses.objective import active_channels
from learning.teacher import TeacherDistribution
from protocols.spec.objective import ObjectiveSpec
from protocols.spec.policy_gradient import GrpoSpec
from protocols.train_batch import HintedTurn, PolicySample, PreferencePair, TrainBatch
from protocols.types import Sample, Sampling


def sample(name: str, prompt: int, response: int) -> Sample:
    return Sample(name, "a", (1,) * prompt, (2,) * response, (0.0,) * response, (0,) * response)


def episode(name: str, prompt: int, marks: str) -> PolicySample:
    """`marks` has an o for each token of the student's own and an x for a tool's."""
    own = tuple(m == "o" for m in marks)
    return PolicySample(sample(name, prompt, len(marks)), own, Sampling(), "g", 1.0)


# Two documents' samples of 2 and 1 tokens, two episodes of 4 and 3, a pair of 2 and 1.
BATCH = TrainBatch(
    doc=[sample("d0", 3, 2), sample("d1", 1, 1)],
    rl=[episode("e0", 2, "oxoo"), episode("e1", 1, "oxo")],
    turns=[HintedTurn("e1", 2, 3, (1,)), HintedTurn("e0", 2, 4, (1,))],
    pairs=[PreferencePair("p", "a", (1, 1), (2, 2), (2,), 0.0, 0.0, 0)],
    scores={
        "doc_teacher": TeacherDistribution(
            None, torch.arange(3)[:, None], torch.arange(3.0)[:, None]
        ),
        "old": torch.arange(7.0),
        "sdpo_teacher": TeacherDistribution(logits=torch.tensor([[12.0], [2.0], [3.0]])),
    },
)
KEPT = GrpoSpec(zero_variance="keep")  # for single episodes of a group too
CHANNELS = active_channels(ObjectiveSpec(w_rl=1.0, alpha=1.0, beta=1.0, grpo=KEPT))


def prepared(batch: TrainBatch) -> PreparedBatch:
    return prepare(batch, CHANNELS, 0)


PREPARED = prepared(BATCH)


def laid_out(which: PreparedBatch, part: Sequence[Member]) -> MicroBatch:
    return which.micro_batch(part, lambda samples: pack(samples, {"a": 4}, 24))


def listed(index: slice | torch.Tensor) -> list[int]:
    return list(range(index.start, index.stop)) if isinstance(index, slice) else index.tolist()


def test_where_everything_stands() -> None:
    """d0 2, d1 1 | e0 o x o o | e1: its hinted turn alone, for it has no reward | 2 and 1."""
    died = replace(BATCH.rl[1], reward=None, error_kind="environment_died")
    which = prepared(replace(BATCH, rl=[BATCH.rl[0], died]))
    assert [s.id for s in which.samples()] == ["d0", "d1", "e0", "e1", "p/chosen", "p/rejected"]
    (part,) = which.split(None)
    micro = laid_out(which, part)
    assert len(micro.packed.targets) == 10
    found = {name: (listed(t.at), t.first) for name, t in micro.tokens.items()}
    assert found == {
        "doc_kl": ([0, 1, 2], 0),
        "grpo": ([3, 4, 5], 3),
        "sdpo": ([6, 4, 5], 3),  # item by item: e1's, then e0's
        "replay_dpo": ([7, 8, 9], 7),
    }
    assert listed(micro.tokens["grpo"].inside) == [0, 2, 3]
    assert listed(micro.tokens["sdpo"].inside) == [6, 2, 3]
    assert micro.tokens["grpo"].items == [(0, [0, 2, 3])]
    (part,) = PREPARED.split(None)
    both = laid_out(PREPARED, part)
    assert listed(both.tokens["grpo"].at) == [3, 4, 5, 6, 7]
    assert [len(own) for _, own in both.tokens["grpo"].items] == [3, 2]
    assert both.tokens["replay_dpo"].first == 8


def test_what_no_channel_has_an_item_of_is_not_read() -> None:
    died = replace(BATCH.rl[0], reward=None, error_kind="environment_died")
    which = prepared(
        replace(
            BATCH, rl=[died, BATCH.rl[1]], turns=(), scores={**BATCH.scores, "sdpo_teacher": None}
        )
    )
    assert [s.id for s in which.samples(["rl"])] == ["e1"]


def test_documents_alone() -> None:
    which = prepare(TrainBatch(doc=BATCH.doc, scores=BATCH.scores), CHANNELS[:1], 0)
    micro = laid_out(which, which.split(None)[0])
    assert list(micro.tokens) == ["doc_kl"]
    assert micro.tokens["doc_kl"].at == micro.tokens["doc_kl"].rows == slice(0, 3)


def test_what_belongs_to_a_sample_goes_with_it() -> None:
    """Of the second sample and the second episode alone."""
    tokens = laid_out(PREPARED, [("doc", 1), ("rl", 1)]).tokens
    teacher = BATCH.scores["doc_teacher"].rows(tokens["doc_kl"].rows)
    assert teacher.indices.tolist() == [[2]]
    assert BATCH.scores["old"][tokens["grpo"].inside].tolist() == [4, 6]
    assert BATCH.scores["sdpo_teacher"].rows(tokens["sdpo"].rows).logits.tolist() == [[12]]
    assert BATCH.scores["old"][tokens["sdpo"].inside].tolist() == [6]
    assert (tokens["replay_dpo"].items, tokens["replay_dpo"].at) == ([], slice(0, 0))
    nothing = laid_out(PREPARED, [])
    assert [t.items for t in nothing.tokens.values()] == [[]] * 4
    assert len(nothing.packed.targets) == 0


def split(batch: TrainBatch, *given: Any, **more: Any) -> list[list[str]]:
    """The micro-batches by the names of what is in them."""
    which = prepared(batch)
    held = {"doc": [s.id for s in batch.doc], "rl": [r.sample.id for r in batch.rl], "pairs": ["p"]}
    return [
        [held[name][i] for name, i in sorted(part, key=lambda m: (list(held).index(m[0]), m[1]))]
        for part in which.split(*given, **more)
    ]


def test_micro_batches_by_hand() -> None:
    """Lengths 5, 2 | 6, 4 | 4 + 3."""
    assert split(BATCH, None) == split(BATCH, 24) == [["d0", "d1", "e0", "e1", "p"]]
    assert split(BATCH, None, passes=2) == [["d0", "d1", "e0"], ["e1", "p"]]  # of 13 and 11 tokens
    assert split(BATCH, 23) == [["d0", "d1", "e0", "e1"], ["p"]]
    assert split(BATCH, 7) == [["d0", "d1"], ["e0"], ["e1"], ["p"]]
    assert split(BATCH, 1) == [["d0"], ["d1"], ["e0"], ["e1"], ["p"]]
    assert split(TrainBatch(), None) == split(TrainBatch(), 5) == []


def test_the_same_text_is_in_one_micro_batch() -> None:
    """An episode and the document's sample of the same tokens; of two such episodes the last."""
    twin = BATCH.rl[1].sample
    again = replace(BATCH.rl[1], sample=replace(twin, id="e2"))
    batch = TrainBatch(
        doc=[twin],
        rl=[*BATCH.rl, again],
        scores={"doc_teacher": TeacherDistribution(torch.zeros(3, 9))},
    )
    assert split(batch, 1) == [["e1", "e2"], ["e0"], ["e1"]]


def test_ranks_by_hand() -> None:
    """Lengths 7 (the pair), 6, 5, 4, 2 in turn to 0, 1, 1, 0 and, both at 11, to 0; of three
    ranks to 0, 1, 2, 2 and 1. Within a rank they keep their order."""
    shares = [split(BATCH, None, rank, 2) for rank in range(2)]
    assert shares == [[["d1", "e1", "p"]], [["d0", "e0"]]]
    shares = [split(BATCH, None, rank, 3) for rank in range(3)]
    assert shares == [[["p"]], [["d1", "e0"]], [["d0", "e1"]]]
    assert split(BATCH, None, 5, 6) == []
    assert split(BATCH, None, 5, 6, even=True) == [[]]
    evened = [split(BATCH, 11, rank, 2, even=True) for rank in range(2)]
    assert evened == [[["d1", "e1"], ["p"]], [["d0", "e0"], []]]
    assert split(TrainBatch(), None, 1, 2, even=True) == []


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
    batch = TrainBatch(
        doc=[sample(f"d{i}", *shape) for i, shape in enumerate(shapes)],
        scores={"doc_teacher": TeacherDistribution(torch.zeros(sum(n for _, n in shapes), 9))},
    )
    shares = [split(batch, micro_tokens, rank, world) for rank in range(world)]
    held = [name for parts in shares for part in parts for name in part]
    assert sorted(held) == sorted(s.id for s in batch.doc)
    sizes = {s.id: len(s.prompt_ids) + len(s.response_ids) for s in batch.doc}
    lengths = [[sizes[name] for part in parts for name in part] for parts in shares]
    fullest = max(lengths, key=sum)
    assert sum(fullest) - min(map(sum, lengths)) <= min(fullest, default=0)
    evened = [split(batch, micro_tokens, rank, world, even=True) for rank in range(world)]
    assert len({len(parts) for parts in evened}) == 1
    assert [[p for p in parts if p] for parts in evened] == shares


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30))
def test_nothing_is_lost_or_moved(micro_tokens: int) -> None:
    parts = PREPARED.split(micro_tokens)
    names = [name for part in split(BATCH, micro_tokens) for name in part]
    assert names == ["d0", "d1", "e0", "e1", "p"]
    micros = [laid_out(PREPARED, part) for part in parts]
    for name, tokens in (("doc_kl", 3), ("grpo", 5), ("sdpo", 3), ("replay_dpo", 3)):
        own = [t for micro in micros for t in listed(micro.tokens[name].rows)]
        assert sorted(own) == list(range(tokens))
        items = [item for micro in micros for item in micro.tokens[name].items]
        assert sorted(items) == sorted(PREPARED.items[name], key=lambda item: item[0])
    assert sum(len(micro.packed.targets) for micro in micros) == 3 + 5 + 3
