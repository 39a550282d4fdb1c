"""The cartridges that read hints: live, untrained, or an average that a resumed run continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import bank_of, prefixes

from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.protocols.errors import CheckpointError, PublishError
from cartridge_forge.protocols.spec.sections import TrainSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]

CONFIG = TrainSpec(steps=100, lr=0.02, row_tokens=20)


def trainer_of(
    twin: Twin, spec: SdpoSpec, *, alpha: float = 0.5, staleness: int = 0, last: Path | None = None
) -> CartridgeTrainer:
    return CartridgeTrainer(
        twin.model,
        bank_of(twin, tokens=6),
        CONFIG.model_copy(update={"staleness": staleness}),
        last,
        objective=EpisodesObjective(alpha=alpha, sdpo=spec),
    )


def advance(trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples) -> torch.Tensor:
    """One step on what depends on the version alone; the cartridges after it."""
    v = trainer.version
    samples = make_samples(("a", 4, 5), ("b", 2, 3), seed=v, version=v)
    logits = score(twin.model, samples, twin.cached(), 64)
    trainer.step(doc_batch(samples, TeacherDistribution(logits=logits)), v)
    return torch.stack(list(prefixes(trainer.bank).values()))


def published(trainer: CartridgeTrainer, version: int | None = None) -> torch.Tensor | None:
    """The cartridges that read hints at a version, by default the trainer's own."""
    hinted = trainer.snapshot(trainer.version if version is None else version).hinted
    return None if hinted is None else torch.stack(list(hinted.values()))


def test_the_average_is_the_recursion_over_the_versions(
    llama: Twin, make_samples: MakeSamples
) -> None:
    """By hand in float64: t0 = s0, t_v = 0.75 t_(v-1) + 0.25 s_v; of the third version
    0.421875 s0 + 0.140625 s1 + 0.1875 s2 + 0.25 s3. Frozen tokens are those of all versions."""
    trainer = trainer_of(llama, SdpoSpec(teacher="ema", ema_decay=0.75))
    trainer.begin("on_policy", 9)
    students = [torch.stack(list(prefixes(trainer.bank).values()))]
    first = published(trainer)
    assert first is not None
    assert torch.equal(first, students[0])
    students += [advance(trainer, llama, make_samples) for _ in range(3)]
    shares = (0.421875, 0.140625, 0.1875, 0.25)
    expected = sum(w * s.double() for w, s in zip(shares, students, strict=True))
    found = published(trainer)
    assert found is not None
    assert torch.allclose(found.double(), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(found, students[-1], atol=1e-3)
    assert torch.equal(found[..., :1, :], students[0][..., :1, :])
    trainer.begin("offline", 9)  # another arm averages anew
    again = published(trainer)
    assert again is not None
    assert torch.equal(again, students[0])


def test_an_average_of_the_newest_alone_is_the_live_cartridge(
    llama: Twin, make_samples: MakeSamples
) -> None:
    trainer = trainer_of(llama, SdpoSpec(teacher="ema", ema_decay=0.0))
    trainer.begin("on_policy", 9)
    for _ in range(3):
        student = advance(trainer, llama, make_samples)
        found = published(trainer)
        assert found is not None
        assert torch.equal(found, student)


def test_the_base_stays_untrained(llama: Twin, make_samples: MakeSamples) -> None:
    trainer = trainer_of(llama, SdpoSpec(teacher="base"))
    trainer.begin("on_policy", 9)
    untrained = torch.stack(list(prefixes(trainer.bank).values()))
    for _ in range(2):
        assert not torch.equal(advance(trainer, llama, make_samples), untrained)
        found = published(trainer)
        assert found is not None
        assert torch.equal(found, untrained)


@pytest.mark.parametrize(("teacher", "alpha"), [("live", 0.5), ("ema", 0.0), ("base", 0.0)])
def test_nothing_more_is_published_or_kept_where_the_live_ones_read(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path, teacher: str, alpha: float
) -> None:
    spec = SdpoSpec.model_validate({"teacher": teacher})
    trainer = trainer_of(llama, spec, alpha=alpha)
    trainer.begin("on_policy", 9)
    advance(trainer, llama, make_samples)
    assert published(trainer) is None
    saved = read_checkpoint(trainer.save(tmp_path, {}, 1))
    assert "hinted" not in saved.cartridge("a")


def test_a_resumed_run_continues_the_average_bit_for_bit(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path
) -> None:
    spec = SdpoSpec(teacher="ema", ema_decay=0.9)
    whole = trainer_of(llama, spec)
    whole.begin("on_policy", 9)
    for _ in range(2):
        advance(whole, llama, make_samples)
    path = whole.save(tmp_path, {}, 2)
    resumed = trainer_of(llama, spec)
    resumed.restore(read_checkpoint(path))
    for _ in range(2):
        before, after = published(whole), published(resumed)
        assert before is not None
        assert after is not None
        assert torch.equal(before, after)
        advance(whole, llama, make_samples)
        advance(resumed, llama, make_samples)
    for other in (SdpoSpec(), SdpoSpec(variant="sampled")):
        with pytest.raises(CheckpointError, match="made with another teacher of hints"):
            trainer_of(llama, other).restore(read_checkpoint(path))


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_replacement_publishes_the_same_again(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path, staleness: int
) -> None:
    spec, last = SdpoSpec(teacher="ema"), tmp_path / "last"
    lost = trainer_of(llama, spec, staleness=staleness, last=last)
    lost.begin("on_policy", 9)
    told = [published(lost)]
    for _ in range(3):
        advance(lost, llama, make_samples)
        told.append(published(lost))
    lost._keep()
    replacement = trainer_of(llama, spec, staleness=staleness, last=last)
    assert replacement.recover() == 3
    for version in range(3 - staleness, 4):
        found, expected = published(replacement, version), told[version]
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)
    with pytest.raises(PublishError, match=f"version {2 - staleness} cannot be published"):
        lost.snapshot(2 - staleness)
