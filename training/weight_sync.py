"""Keep a run's tensors in the tensor plane: published cartridges and the scores of a step.

    publish(v)   trainer -> plane -> every reader in service, and readers that join later: the
                 cartridges that changed since the version before
    read(ref)    marks a key as no longer needed; `tidy` deletes it beside the next work, with
                 others until they hold TIDY_BYTES

A packet of cartridges stays in the plane as long as a published version refers to it.

A plane that is lost with its process is replaced, and `refill` publishes the cartridges into the
new one. Calls that were using the lost plane raise PlaneError and are repeated (`Mesh.replaced`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from cartridge_forge.protocols.errors import PlaneError, PublishError, RunError
from cartridge_forge.protocols.spec.mesh import CARTRIDGE_READERS, HINTED_TEACHER
from cartridge_forge.protocols.step import (
    PUBLISHED,
    CartridgeSnapshot,
    PublishedCartridge,
    TensorRef,
)
from cartridge_forge.services.clients import (
    PublishedCartridges,
    TrainerClient,
    load_cartridges,
    remember_cartridges,
)
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.services.planes.codec import packed_bytes
from cartridge_forge.services.pool.pool import Pool, gather

REPEATS = 5  # of a publish whose host is lost before another host has it
TIDY_BYTES = 8 * 2**20  # no longer needed, at which they are deleted: a call takes 1.5 ms


class WeightSync:
    """Publish cartridge versions and delete tensors that were read. `keep` versions stay published.

    `moved_bytes` is the size of what the last publish put, counted once for the put and once for
    each reader of it. Every key is kept with the number of the plane that it was written to
    (`Mesh.plane_life`), and is never looked up or deleted in another plane. `canary` checks each
    published version, where generators give no better evidence.
    """

    def __init__(self, mesh: Mesh, keep: int, published: PublishedCartridges | None = None) -> None:
        self._mesh = mesh
        self._keep = keep
        self._trainer = TrainerClient(mesh.pools)
        self.moved_bytes = 0
        self.published = published or PublishedCartridges(keep + 1)
        self.canary: Any = None  # a `plugins.vllm.canary.Canary`
        self._published: list[tuple[int, CartridgeSnapshot]] = []
        self._read: list[tuple[int, str, int]] = []  # plane, key, bytes
        # A key is in the plane before it is in these lists; `_forgotten` waits for that.
        self._moving = asyncio.Lock()
        self._deleting: asyncio.Task[None] | None = None
        self._sweep: set[str] = set()  # key prefixes to search; "" is all keys
        self._under_way: set[str] = set()
        self._spared: set[str] = set()
        self._ahead = -1  # the plane that a version is put into with its step
        mesh.refill = self.refill

    @property
    def newest(self) -> int:
        """Return the newest version that every reader in service holds; -1 before the first."""
        return self._published[-1][1].version if self._published else -1

    def ahead(self, version: int) -> CartridgeSnapshot:
        """Return what is in the plane of the version before, for a trainer that puts `version` into
        it with its step. What it puts is protected until `publish`."""
        self._ahead = self._mesh.plane_life
        self.begin(f"{PUBLISHED}{version}")
        return self._before(self._ahead) or CartridgeSnapshot(version, ())

    def _before(self, life: int) -> CartridgeSnapshot | None:
        return next((s for n, s in self._published[::-1] if n == life), None)

    async def publish(self, version: int, put: CartridgeSnapshot | None = None) -> None:
        """Publish the trainer's cartridges to every reader, those that it has `put` since `ahead`
        or that it puts now. Raises RunError when they have another version."""
        tries = REPEATS
        if put is not None and self._ahead != self._mesh.plane_life:
            put = None  # replaced meanwhile: unknown which plane has it
            self._sweep.add("")
        while True:
            life = self._mesh.plane_life
            try:
                async with self._moving:
                    previous = self._before(life)
                    there, put = put, None
                    snapshot = there or await self._trainer.publish(version, previous)
                    await self._take(snapshot, version)
                    if life == self._mesh.plane_life:
                        self._published.append((life, snapshot))
                        self._evict()
                        break
                    self._sweep.add("")  # replaced meanwhile: unknown which plane has it
            except PlaneError as error:
                tries -= 1
                if self._mesh.relays is None or not tries or life != self._mesh.plane_life:
                    await self._mesh.replaced(life, error)
                if self._mesh.relays is not None:  # lost with its host: it is put once more
                    self._sweep.add("")
        self.ended(f"{PUBLISHED}{version}")
        await self.tidy()
        readers = sum(len(pool) for pool in self._readers)
        self.moved_bytes = _put_bytes(snapshot.cartridges, previous) * (1 + readers)
        if snapshot.hinted:
            hinted = len(self._mesh.pools[HINTED_TEACHER])
            self.moved_bytes += _put_bytes(snapshot.hinted, previous) * (1 + hinted)

    def _evict(self) -> None:
        """Mark the packets that only versions beyond `keep` refer to as no longer needed."""
        evicted = self._published[: -self._keep]
        self._published = self._published[-self._keep :]
        live = {key for _, snapshot in self._published for key in snapshot.packets}
        packets = {
            r.key: (life, r) for life, snapshot in evicted for r in snapshot.packets.values()
        }
        for key, (life, ref) in packets.items():
            if key not in live:
                self.read(ref, life)

    async def _take(self, snapshot: CartridgeSnapshot, version: int) -> None:
        """Have every reader load what was put into the plane."""
        if snapshot.version != version:
            raise RunError(
                f"the trainer published version {snapshot.version} where {version} was due"
            )
        self.published.add(snapshot)
        calls = [load_cartridges(self._readers, snapshot, self._keep)]
        if self._mesh.relays is not None:
            calls.append(self._mesh.keep(snapshot))
        await gather(calls)
        if self.canary is not None:
            await self.canary.check(snapshot)

    @property
    def _readers(self) -> list[Pool]:
        pools = self._mesh.pools
        return [pools[role] for role in CARTRIDGE_READERS if role in pools]

    async def refill(self) -> None:
        """Publish all published versions into the plane that replaced the lost one, under new keys,
        what they share once. A publish that the loss interrupted is not repeated here: `publish`
        repeats it."""
        async with self._moving:
            life = self._mesh.plane_life
            refilled: list[tuple[int, CartridgeSnapshot]] = []
            for written_life, snapshot in self._published:
                if written_life != life:
                    previous = refilled[-1][1] if refilled else None
                    try:
                        snapshot = await self._trainer.publish(snapshot.version, previous)
                    except PublishError:  # a recovered trainer has a later version; so do rollouts
                        continue
                    await self._mesh.keep(snapshot)
                refilled.append((life, snapshot))
            # Assigned at once when all are published: if this plane is lost too, the next one
            # must get all of them.
            self._published = refilled
            if self._mesh.relays is not None:  # hosts still have the packets of the lost plane
                self._sweep.add("")
            for pool in self._readers:
                remember_cartridges(pool, [snapshot for _, snapshot in refilled])
            for pool in self._readers:
                await pool.tell()

    def read(self, ref: TensorRef, life: int) -> None:
        """Mark a key as no longer needed. `life` numbers the plane that has it."""
        self._read.append((life, ref.key, packed_bytes(ref.layout)))

    def begin(self, stem: str) -> None:
        """Protect keys that begin with `stem` from deletion until `ended`."""
        self._under_way.add(stem)

    def ended(self, stem: str) -> None:
        """End the protection of `stem`: its keys are read, and no more are written."""
        self._under_way.discard(stem)
        if stem in self._spared:
            self._spared.remove(stem)
            self._sweep.add(f"{stem}/")

    def replica_lost(self) -> None:
        """Make the next `tidy` search for keys that the lost replica wrote but never reported."""
        self._sweep.add("")

    async def tidy(self) -> None:
        """Start to delete keys that are no longer needed, beside the work that follows, unless they
        are few. First wait for the previous deletion, and raise its error: the plane holds at most
        TIDY_BYTES and one step's tensors too many."""
        await self.tidied()
        sweep, self._sweep = self._sweep, set()
        lost = {key: None for prefix in sorted(sweep) for key in await self._forgotten(prefix)}
        if lost or sum(size for _, _, size in self._read) >= TIDY_BYTES:
            keys = [*((life, key) for life, key, _ in self._read), *lost]
            self._read.clear()
            self._deleting = asyncio.create_task(self._delete(keys))

    async def _forgotten(self, prefix: str) -> list[tuple[int, str]]:
        """Return unlisted keys, written by replicas that died before they reported them."""
        life, plane = self._mesh.plane_life, self._mesh.plane
        assert plane is not None
        async with self._moving:
            try:
                stored_keys = await plane.keys(prefix)
            except PlaneError:  # the plane is being replaced, and its keys are gone
                return []
            published = {key for _, snapshot in self._published for key in snapshot.packets}
            known_keys = published | {key for _, key, _ in self._read}
            lost = []
            for key in (key for key in stored_keys if key not in known_keys):
                stems = [stem for stem in self._under_way if key.startswith(f"{stem}/")]
                self._spared.update(stems)
                if not stems:
                    lost.append((life, key))
            return lost

    async def tidied(self) -> None:
        if self._deleting is not None:
            await self._deleting

    def cancel(self) -> None:
        if self._deleting is not None:
            self._deleting.cancel()

    async def _delete(self, keys: Sequence[tuple[int, str]]) -> None:
        life, plane = self._mesh.plane_life, self._mesh.plane
        assert plane is not None
        try:
            # Keys of a lost plane are gone already.
            if stored := [key for written_life, key in keys if written_life == life]:
                await plane.delete(*stored)
        except PlaneError as error:
            await self._mesh.replaced(life, error)  # the keys went with the plane


def _put_bytes(cartridges: Sequence[PublishedCartridge], previous: CartridgeSnapshot | None) -> int:
    """Return the bytes of the packets of these cartridges that were not in the plane `before`."""
    stored = {} if previous is None else previous.packets
    packets = {c.packet.key: c.packet for c in cartridges if c.packet.key not in stored}
    return sum(packed_bytes(packet.layout) for packet in packets.values())
