"""Records of the channels: what they refuse, and the turn that a hint is put before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import (
    HintedTurn,
    PolicySample,
    PrecomputedScores,
    PreferencePair,
    Sample,
    Sampling,
    completions,
    hinted,
)

EPISODE = PolicySample(
    Sample(
        "e", "p1", (4, 91, 2), (7, 8, 40, 41, 9), (-0.1, -0.7, 0.0, 0.0, -0.2), (3, 3, -1, -1, 3)
    ),
    (True, True, False, False, True),
    Sampling(),
    "g",
    1.0,
)
ITEM = HintedTurn("e", 4, 5, (4, 91, 2, 7, 8, 40, 41, 60, 61))
PAIR = PreferencePair("p", "p1", (4, 91, 2), (7, 8), (9,), -1.7, -0.4, 3)


def test_a_turn_is_read_under_the_hint() -> None:
    (sample,) = hinted([ITEM], [EPISODE])
    assert sample == Sample("e[4:5]", "p1", ITEM.context_ids, (9,), (-0.2,), (3,))
    first, again = hinted([HintedTurn("e", 0, 2, (4, 60, 2)), ITEM], [EPISODE])
    assert (first.prompt_ids, first.response_ids) == ((4, 60, 2), (7, 8))
    assert again == sample


def test_the_sides_of_pairs_in_turn() -> None:
    sides = completions([PAIR, replace(PAIR, id="q", cartridge="p2")])
    assert [s.id for s in sides] == ["p/chosen", "p/rejected", "q/chosen", "q/rejected"]
    assert [s.response_ids for s in sides] == [(7, 8), (9,), (7, 8), (9,)]
    assert [s.cartridge for s in sides] == ["p1", "p1", "p2", "p2"]
    assert {s.prompt_ids for s in sides} == {(4, 91, 2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trained": (True,)}, "e has 5 response tokens, 1 trained marks and 5 sampler"),
        ({"reward": None}, "reward None and error_kind '': an episode has a reward, or None and"),
        ({"error_kind": "timeout"}, "reward 1.0 and error_kind 'timeout'"),
        ({"reward": float("nan")}, "reward nan; use None and an error_kind"),
        ({"trained": (True,) * 5}, r"trains on tokens \[2, 3\] .* which no version sampled"),
    ],
)
def test_an_episode_that_contradicts_itself(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        replace(EPISODE, **change)


@pytest.mark.parametrize(
    "change", [{"start": 5}, {"start": -1}, {"context_ids": ()}, {"start": 4, "stop": 4}]
)
def test_an_item_needs_a_context_and_a_token(change: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"hinted turn of e spans \["):
        replace(ITEM, **change)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (replace(ITEM, sample="f"), "sample f, which is not in the batch"),
        (replace(ITEM, stop=6), r"tokens \[4, 6\), which are not all the student's own"),
        (replace(ITEM, start=1), r"tokens \[1, 5\), which are not all the student's own"),
    ],
)
def test_an_item_that_points_nowhere(item: HintedTurn, message: str) -> None:
    with pytest.raises(DataError, match=message):
        hinted([item], [EPISODE])


@pytest.mark.parametrize(
    ("ids", "logprobs"),
    [
        ((), ()),
        (((1, 2),), ((-0.1,),)),
        (((1, 2), (3, 4)), ((-0.1, -0.2),)),
        (((1, 2), (3,)), ((-0.1, -0.2), (-0.1,))),
        (((),), ((),)),
    ],
)
def test_stored_scores_have_as_many_at_every_token(ids: Any, logprobs: Any) -> None:
    with pytest.raises(DataError, match="as many at every token"):
        PrecomputedScores(0, ids, logprobs)


@pytest.mark.parametrize("side", ["context_ids", "chosen_ids", "rejected_ids"])
def test_a_pair_needs_all_three(side: str) -> None:
    with pytest.raises(DataError, match="pair p has an empty context or completion"):
        replace(PAIR, **{side: ()})
