"""A twin elsewhere, and trainers of both to compare."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from channel_setup import ALL, changed
from second_device import elsewhere
from twins import Twin

from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import TrainStepOutput

TRAIN = TrainSpec(steps=5, lr=0.02, row_tokens=24)
OBJECTIVE = changed(ALL, micro_tokens=40, compare_every=3)


@pytest.fixture
def there(llama: Twin) -> Iterator[Twin]:
    """The same twin with its model, and what it has read, elsewhere."""
    with elsewhere():
        model = copy.deepcopy(llama.model).to("elsewhere")
        yield replace(llama, model=model, kv={n: kv.to("elsewhere") for n, kv in llama.kv.items()})


def trainer_of(
    twin: Twin,
    train: TrainSpec = TRAIN,
    objective: EpisodesObjective = OBJECTIVE,
    last_state: Path | None = None,
) -> CartridgeTrainer:
    """Return a trainer of two cartridges, where the twin's model is."""
    bank = first_tokens({n: twin.kv[n] for n in "ab"}, 8, 1)
    return CartridgeTrainer(
        twin.model, bank, train, last_state, objective=objective, publish_dtype="bfloat16"
    )


def same(one: TrainStepOutput, other: TrainStepOutput) -> None:
    """Assert two steps equal but for rounding."""
    assert one.tokens == other.tokens
    assert one.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert one.terms.keys() == other.terms.keys()
    for name, term in one.terms.items():
        assert term == pytest.approx(dict(other.terms[name]), rel=1e-3, abs=1e-5)
    assert one.cosines == pytest.approx(dict(other.cosines), abs=1e-4)
