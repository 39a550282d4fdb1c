"""The trainer: versions that are never reused, and a resumed run that equals the uninterrupted."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.learning.trainer_setup import Killed, copied, killed, same, trainer_of

from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


def batch(
    twin: Twin, make_samples: MakeSamples, version: int
) -> tuple[list[Sample], TeacherDistribution]:
    """Samples and scores that depend on the version alone."""
    shapes = [("a", 4, 5), ("b", 2, 3), ("a", 3, 2)]
    if version in (1, 4):  # steps that do not train b
        del shapes[1]
    samples = make_samples(*shapes, seed=version, version=version)
    return samples, TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))


def outcomes(trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples, call: str) -> object:
    """One call of the controller: what it answers."""
    kind, _, version = call.partition(" ")
    if kind == "step":
        return trainer.step(doc_batch(*batch(twin, make_samples, int(version))), int(version))
    if kind == "publish":
        snapshot = trainer.snapshot(int(version))
        return snapshot.since, {name: kv.tolist() for name, kv in snapshot.kv.items()}
    return trainer.begin(kind, 2)


# Two arms of two steps each, published where the controller publishes.
CALLS = [
    "on_policy", "publish 0", "step 0", "publish 1", "step 1", "publish 2",
    "offline", "step 3", "step 4", "publish 5",
]  # fmt: skip

KILLS = ("", "before it began", "before its state was kept", "before it told")


@pytest.fixture(scope="module")
def undisturbed(llama: Twin, make_samples: MakeSamples) -> tuple[list[object], dict]:
    trainer = trainer_of(llama)
    answers = [outcomes(trainer, llama, make_samples, call) for call in CALLS]
    return answers, copied(trainer)


@settings(max_examples=15, deadline=None)
@given(kills=st.lists(st.sampled_from(KILLS), min_size=len(CALLS), max_size=len(CALLS)))
def test_killed_anywhere_and_replaced_it_goes_on_bit_for_bit(
    llama: Twin,
    make_samples: MakeSamples,
    undisturbed: tuple[list[object], dict],
    kills: list[str],
) -> None:
    expected, end = undisturbed
    with tempfile.TemporaryDirectory() as directory:
        last_state = Path(directory) / "last-state"
        trainer = trainer_of(llama, last_state=last_state)
        for call, kill, answer in zip(CALLS, kills, expected, strict=True):
            if kill:
                if kill == "before its state was kept":
                    trainer._keep = killed
                if kill != "before it began":
                    try:
                        outcomes(trainer, llama, make_samples, call)
                    except Killed:
                        assert kill == "before its state was kept"
                trainer = trainer_of(llama, last_state=last_state)
                trainer.recover()
            assert outcomes(trainer, llama, make_samples, call) == answer
        same(copied(trainer), end)
        assert trainer.version == 5
