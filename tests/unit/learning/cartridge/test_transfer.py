"""What goes through the plane is what the other side lacks, counted in a real plane's files."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest
import torch
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
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import PublishedCartridge
from cartridge_forge.services.planes.codec import layout_of, packed_bytes
from cartridge_forge.services.planes.shared_memory import SharedMemoryPlane

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
