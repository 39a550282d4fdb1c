"""Test how cartridges begin: from a file, from another's numbers, with hints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from channel_setup import bank_of, prefixes
from torch import Tensor

from cartridge_forge.learning.cartridge import (
    CartridgeVersions,
    Fingerprints,
    fingerprint,
    get_missing,
    packet_names,
    put_changed,
    since_of,
)
from cartridge_forge.learning.checkpoint import read_checkpoint
from cartridge_forge.learning.initialization import CartridgeInit, initial_bank
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.teacher import TeacherDistribution, score
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.plugins.library.formats import convert, run_checkpoint
from cartridge_forge.protocols.errors import CheckpointError, PublishError
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import PublishedCartridge
from cartridge_forge.services.planes.codec import layout_of, packed_bytes

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


if TYPE_CHECKING:
    from collections.abc import Callable

    from twins import Twin

    from cartridge_forge.protocols.step import Sample

    MakeSamples = Callable[..., list[Sample]]


START_FROM_FILE_CONFIG = TrainSpec(steps=3, lr=0.02, row_tokens=20)


def train(trainer: CartridgeTrainer, twin: Twin, make_samples: MakeSamples) -> None:
    for version in range(3):
        samples = make_samples(("a", 4, 5), ("b", 2, 3), seed=version, version=version)
        teacher = TeacherDistribution(logits=score(twin.model, samples, twin.cached(), 64))
        trainer.step(doc_batch(samples, teacher), version)


def foreign(twin: Twin, file: Path, spelling: str, frozen: int) -> Path:
    """A `.pt` as HazyResearch's code writes it: no label of ours; -0.0 and a subnormal number among
    the frozen ones."""
    kv = twin.kv["c"][:, :, :, :14] * 1.25
    kv[0, 0, 0, 0, :2] = torch.tensor([-0.0, 1e-40])
    lists = {}
    for part, kept in ((f"{spelling}_", slice(frozen)), ("trainable_", slice(frozen, None))):
        for kind, word in enumerate(("keys", "values")):
            layers = [layer[kind, :, kept][None].clone() for layer in kv]
            lists[part + word] = torch.nn.ParameterList(torch.nn.Parameter(x) for x in layers)
    torch.save(lists, file)
    return file


def bits(kv: torch.Tensor) -> torch.Tensor:
    return kv.contiguous().view(torch.int32)


@pytest.mark.parametrize("spelling", ["frozen", "fixed"])
@pytest.mark.parametrize("frozen", [8, 0])
def test_three_steps_change_every_trained_token_and_no_bit_of_a_frozen_one(
    llama: Twin, make_samples: MakeSamples, tmp_path: Path, spelling: str, frozen: int
) -> None:
    before = convert.read(foreign(llama, tmp_path / "in.pt", spelling, frozen))
    assert (before.frozen, before.tokens) == (frozen, 14)
    given = {name: (before.kv, before.frozen) for name in "ab"}
    bank = initial_bank(llama.model, [], CartridgeInit("first_tokens", 14, 1), given)
    trainer = CartridgeTrainer(llama.model, bank, START_FROM_FILE_CONFIG)
    trainer.begin("on_policy", 3)
    assert torch.equal(bits(trainer.snapshot(0).kv["a"]), bits(before.kv))  # the untrained arm
    train(trainer, llama, make_samples)

    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    checkpoint = trainer.save(tmp_path / "run" / "checkpoints", {}, 3)
    convert.convert(run_checkpoint.read(tmp_path / "run", "b"), tmp_path / "out.pt", "hazy")
    after = convert.read(tmp_path / "out.pt")
    assert after.frozen == frozen
    assert torch.equal(bits(after.kv[..., :frozen, :]), bits(before.kv[..., :frozen, :]))
    moved = (after.kv - before.kv)[..., frozen:, :].abs()
    assert moved.amax(dim=(1, 2, 4)).min() > 0, "of every token in every layer"

    again = CartridgeTrainer(
        llama.model,
        initial_bank(llama.model, [], CartridgeInit("x", 14, 1), given),
        START_FROM_FILE_CONFIG,
    )
    again.restore(read_checkpoint(checkpoint))
    assert all(
        torch.equal(bits(one), bits(other))
        for one, other in zip(again.bank.kv(), trainer.bank.kv(), strict=True)
    )


NAMES = [f"patient_{i:02d}" for i in range(20)]
SHAPE = (2, 2, 2, 8, 16)  # 4 KiB of float32, a multiple of a packet's lines
BYTES = 4 * 2 * 2 * 2 * 8 * 16


def kv(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(seed))


class Files:
    """A plane in memory, and the trainer's side of it."""

    def __init__(self, plane: SharedMemoryPlane) -> None:
        self.plane = plane
        self.published: tuple[PublishedCartridge, ...] = ()
        self._prints = Fingerprints()
        self._puts = 0

    def size(self) -> int:
        return sum(path.stat().st_size for path in Path(self.plane.root).iterdir())

    async def publish(
        self, since: Mapping[str, int], tensors: Mapping[str, Tensor]
    ) -> tuple[PublishedCartridge, ...]:
        async def put(group: Mapping[str, Tensor]) -> object:
            self._puts += 1
            return await self.plane.put(f"cartridges/{self._puts}", group)

        self.published = await put_changed(
            put, since, tensors, self._prints.fingerprint, self.published
        )
        return self.published


def with_plane(tmp_path: Path, work: Callable[[Files], Awaitable[None]]) -> None:
    async def scenario() -> None:
        plane = await SharedMemoryPlane.start(str(tmp_path))
        try:
            await work(Files(plane))
        finally:
            await plane.stop()

    asyncio.run(scenario())


async def load(
    files: Files, held: CartridgeVersions, version: int, cartridges: tuple[PublishedCartridge, ...]
) -> set[str]:
    """The reader's side; returns the names that it got."""
    since = since_of(cartridges)
    new = await get_missing(files.plane.get, cartridges, held.missing(since))
    held.add(version, since, new)
    return set(new)


def test_two_of_twenty_are_put_and_got(tmp_path: Path) -> None:
    async def work(files: Files) -> None:
        tensors = {name: kv(i) for i, name in enumerate(NAMES)}
        since = dict.fromkeys(NAMES, 0)
        held = CartridgeVersions(keep=2)
        first = await files.publish(since, tensors)
        assert files.size() == 20 * BYTES
        assert await load(files, held, 0, first) == set(NAMES)
        touched = ("patient_03", "patient_17")
        for version in (1, 2):
            tensors |= {name: kv(100 * version + i) for i, name in enumerate(touched)}
            since |= dict.fromkeys(touched, version)
            before = files.size()
            published = await files.publish(since, tensors)
            assert files.size() - before == 2 * BYTES, "2/20 of the whole, and no more"
            assert await load(files, held, version, published) == set(touched)
        assert [c.name for c in published] == NAMES
        # A reader that starts now, and one that was there all the time, have the same numbers.
        late = CartridgeVersions(keep=2)
        assert await load(files, late, 2, published) == set(NAMES)
        for c in published:
            for reader in (held, late):
                assert torch.equal(reader.get(c.name, 2), tensors[c.name])
                assert fingerprint(reader.get(c.name, 2)) == c.fingerprint

    with_plane(tmp_path, work)


def test_what_did_not_change_is_not_hashed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Tensor] = []

    def counting(one: Tensor) -> list[str]:
        hashed.append(one)
        return [str(len(hashed))]

    monkeypatch.setattr("cartridge_forge.learning.cartridge.head_digests", counting)

    async def work(files: Files) -> None:
        tensors = {name: kv(i) for i, name in enumerate(NAMES)}
        await files.publish(dict.fromkeys(NAMES, 0), tensors)
        assert len(hashed) == 20
        changed = {**tensors, NAMES[4]: kv(99)}
        await files.publish({**dict.fromkeys(NAMES, 0), NAMES[4]: 1}, changed)
        assert len(hashed) == 21
        assert hashed[-1] is changed[NAMES[4]]

    with_plane(tmp_path, work)


def test_a_change_that_the_trainer_does_not_tell_is_refused(tmp_path: Path) -> None:
    """Readers would keep the old numbers under the new version."""

    async def work(files: Files) -> None:
        since = {"a": 0, "b": 0}
        await files.publish(since, {"a": kv(0), "b": kv(1)})
        with pytest.raises(PublishError, match="cartridge b is said to be unchanged since version"):
            await files.publish({**since, "a": 1}, {"a": kv(2), "b": kv(3)})
        assert files.size() == 2 * BYTES, "nothing was put"

    with_plane(tmp_path, work)


def test_cartridges_of_unequal_length_share_a_packet(tmp_path: Path) -> None:
    async def work(files: Files) -> None:
        tensors = {"corpus": kv(0, 2, 2, 2, 40, 16), "a": kv(1, 2, 2, 2, 3, 16)}
        (corpus, a) = await files.publish({"corpus": 4, "a": 4}, tensors)
        assert corpus.packet == a.packet
        assert files.size() == packed_bytes(layout_of(tensors))
        held = CartridgeVersions(keep=1)
        await load(files, held, 4, (corpus, a))
        assert {n: held.get(n, 4).shape[3] for n in tensors} == {"corpus": 40, "a": 3}

    with_plane(tmp_path, work)


@pytest.mark.parametrize(
    ("sizes", "packets"),
    [
        ([], []),
        ([10, 20, 30, 5], [[0, 1, 2], [3]]),
        ([100, 5, 61, 60], [[0], [1], [2], [3]]),
        ([60, 1, 99], [[0], [1], [2]]),
        ([0, 0, 60, 0], [[0, 1, 2, 3]]),
    ],
)
def test_a_packet_of_several_is_bounded(sizes: list[int], packets: list[list[int]]) -> None:
    found = packet_names({str(i): size for i, size in enumerate(sizes)}, most=60)
    assert found == [[str(i) for i in group] for group in packets]
