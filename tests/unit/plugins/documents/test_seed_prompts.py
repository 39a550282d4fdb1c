import random

import pytest

from cartridge_forge.plugins.documents.seed_prompts import (
    NEXT_SEEDS,
    PLAIN,
    SEEDS,
    asking,
    asking_on,
    plain_next_turn,
    plain_turn,
)
from cartridge_forge.plugins.documents.spec.documents import SEED_KINDS

PASSAGE = "Salt was made here. The road is still called the Grey Lane.\nIt climbs to Tollard."


def test_there_are_five_kinds_and_no_two_seeds_are_alike() -> None:
    assert set(SEEDS) == set(PLAIN) == set(SEED_KINDS)
    seeds = [seed for kind in SEEDS.values() for seed in kind]
    assert len(set(seeds)) == len(seeds) == 10


@pytest.mark.parametrize("kind", SEED_KINDS)
def test_a_sees_the_passage_and_a_seed_of_its_kind(kind: str) -> None:
    told = asking(PASSAGE, kind, random.Random("seeds"))
    assert told.startswith(PASSAGE)
    assert any(seed in told for seed in SEEDS[kind])
    assert told == asking(PASSAGE, kind, random.Random("seeds"))


@pytest.mark.parametrize("kind", SEED_KINDS)
def test_a_plain_turn_quotes_the_passage(kind: str) -> None:
    for seed in range(20):
        cue = plain_turn(PASSAGE, kind, random.Random(seed)).split('"')[1]
        assert cue
        assert cue in PASSAGE
    assert plain_turn("...", kind, random.Random(0))


def test_a_sees_the_conversation_and_takes_up_its_last_answer() -> None:
    history = (("Who made salt?", "Monks did."), ("Where?", "At Tollard."))
    told = asking_on(PASSAGE, history, random.Random("seeds"))
    passage, said, seed = told.split("\n\n---\n\n")
    assert passage == PASSAGE
    assert said == (
        "User: Who made salt?\n\nAssistant: Monks did.\n\nUser: Where?\n\nAssistant: At Tollard."
    )
    assert any(seed.startswith(one) for one in NEXT_SEEDS)
    drawn = {asking_on(PASSAGE, history, random.Random(i)) for i in range(40)}
    assert len(drawn) == len(NEXT_SEEDS) == 3


def test_a_plain_next_turn_quotes_the_answer() -> None:
    for seed in range(20):
        cue = plain_next_turn("Monks did. They sold it.", random.Random(seed)).split('"')[1]
        assert cue in ("Monks did.", "They sold it.")
