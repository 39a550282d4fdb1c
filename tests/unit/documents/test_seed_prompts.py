import random

import pytest

from documents.seed_prompts import PLAIN, SEEDS, asking, plain_turn
from protocols.spec.documents import STUDY_KINDS

PASSAGE = "Salt was made here. The road is still called the Grey Lane.\nIt climbs to Tollard."


def test_there_are_five_kinds_and_no_two_seeds_are_alike() -> None:
    assert set(SEEDS) == set(PLAIN) == set(STUDY_KINDS)
    seeds = [seed for kind in SEEDS.values() for seed in kind]
    assert len(set(seeds)) == len(seeds) == 10


@pytest.mark.parametrize("kind", STUDY_KINDS)
def test_a_sees_the_passage_and_a_seed_of_its_kind(kind: str) -> None:
    told = asking(PASSAGE, kind, random.Random("seeds"))
    assert told.startswith(PASSAGE)
    assert any(seed in told for seed in SEEDS[kind])
    assert told == asking(PASSAGE, kind, random.Random("seeds"))


@pytest.mark.parametrize("kind", STUDY_KINDS)
def test_a_plain_turn_quotes_the_passage(kind: str) -> None:
    for seed in range(20):
        cue = plain_turn(PASSAGE, kind, random.Random(seed)).split('"')[1]
        assert cue
        assert cue in PASSAGE
    assert plain_turn("...", kind, random.Random(0))
