"""What a run keeps in the tensor plane: the published cartridges and the scores of a step.

    publish(v)   trainer -> plane -> every reader in service, and those that come later
    read(key)    nobody needs it any more; `tidy` deletes it beside the work that follows

When the plane is lost with the process that held it, another is opened and `refill` publishes the
cartridges into it anew; whatever was under way meets a PlaneError and is done again (`replaced`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from protocols.errors import PlaneError, PublishError, RunError
from protocols.spec.mesh import CARTRIDGE_READERS
from protocols.types import CartridgeSnapshot
from services.clients import TrainerClient, load_cartridges, remember_cartridges
from services.mesh import Mesh
from services.planes.codec import packed_bytes
from services.pool.pool import Pool


class WeightSync:
    """Publishes cartridge versions and deletes what was read. `keep` versions stay published.

    `moved_bytes` are those of the last version, put once and got by every reader. What lies in the
    plane is listed with the life of the plane that it was written in: nothing is
    looked for, or deleted, in another.
    """

    def __init__(self, mesh: Mesh, keep: int) -> None:
        self._mesh = mesh
        self._keep = keep
        self._trainer = TrainerClient(mesh.pools)
        self.moved_bytes = 0
        self._published: list[tuple[int, CartridgeSnapshot]] = []
        self._read: list[tuple[int, str]] = []
        # A key is in the plane before it is in these lists; who looks for unknown keys waits.
        self._moving = asyncio.Lock()
        self._deleting: asyncio.Task[None] | None = None
        self._sweep: set[str] = set()  # prefixes of keys to look through; "" is all
        self._under_way: set[str] = set()
        self._spared: set[str] = set()
        mesh.refill = self.refill

    async def publish(self, version: int) -> None:
        """Make the trainer's cartridges visible to every reader."""
        while True:
            life = self._mesh.plane_life
            try:
                async with self._moving:
                    snapshot = await self._publish(version)
                    if life == self._mesh.plane_life:
                        self._published.append((life, snapshot))
                        while len(self._published) > self._keep:
                            written, old = self._published.pop(0)
                            self._read.append((written, old.packet.key))
                        break
                    self._sweep.add("")  # replaced meanwhile: nobody can tell where it lies
            except PlaneError as error:
                await self._mesh.replaced(life, error)
        await self.tidy()
        readers = sum(len(pool) for pool in self._readers)
        self.moved_bytes = packed_bytes(snapshot.packet.layout) * (1 + readers)

    async def _publish(self, version: int) -> CartridgeSnapshot:
        snapshot = await self._trainer.publish(version)
        if snapshot.version != version:
            raise RunError(
                f"the trainer published version {snapshot.version} where {version} was due"
            )
        for pool in self._readers:
            await load_cartridges(pool, snapshot, self._keep)
        return snapshot

    @property
    def _readers(self) -> list[Pool]:
        pools = self._mesh.pools
        return [pools[role] for role in CARTRIDGE_READERS if role in pools]

    async def refill(self) -> None:
        """Publish what is published into a plane that replaced the lost one, under new keys.

        A publish that the loss cut short is forgotten first: it is made again (`publish`).
        """
        async with self._moving:
            life = self._mesh.plane_life
            there: list[tuple[int, CartridgeSnapshot]] = []
            for written, snapshot in self._published:
                if written != life:
                    try:
                        snapshot = await self._trainer.publish(snapshot.version)
                    except PublishError:  # a trainer that recovered is past it; so are rollouts
                        continue
                there.append((life, snapshot))
            # In one turn, once all are there: this plane may be lost as well, and then the next
            # one gets all of them.
            self._published = there
            for pool in self._readers:
                remember_cartridges(pool, [snapshot for _, snapshot in there])
            for pool in self._readers:
                await pool.tell()

    def read(self, key: str, life: int) -> None:
        """Nobody reads this key any more. It is in the plane of that life."""
        self._read.append((life, key))

    def begin(self, stem: str) -> None:
        """Keys of this stem are being written, until it is `ended`: whoever writes them knows."""
        self._under_way.add(stem)

    def ended(self, stem: str) -> None:
        """All that is wanted under this stem is read, and nothing more is written."""
        self._under_way.discard(stem)
        if stem in self._spared:
            self._spared.remove(stem)
            self._sweep.add(f"{stem}/")

    def replica_lost(self) -> None:
        """It may have left a packet that nobody knows of: the next `tidy` looks."""
        self._sweep.add("")

    async def tidy(self) -> None:
        """Delete what nobody reads any more, beside the work that follows. The time before is
        waited for first: the store holds one step's tensors too many at most, and a failure to
        delete is met here."""
        await self.tidied()
        sweep, self._sweep = self._sweep, set()
        for prefix in sorted(sweep):
            self._read += await self._forgotten(prefix)
        keys, self._read = self._read, []
        self._deleting = asyncio.create_task(self._delete(keys))

    async def _forgotten(self, prefix: str) -> list[tuple[int, str]]:
        """Keys of replicas that died after a put and before they told of it. Those under way are
        looked through once they have ended."""
        life, plane = self._mesh.plane_life, self._mesh.plane
        assert plane is not None
        async with self._moving:
            try:
                found = await plane.keys(prefix)
            except PlaneError:  # it is being replaced, and they went with it
                return []
            known = {s.packet.key for _, s in self._published} | {key for _, key in self._read}
            lost = []
            for key in (key for key in found if key not in known):
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
            for written, key in keys:
                if written == life:  # what was in a plane that was lost went with it
                    await plane.delete(key)
        except PlaneError as error:
            await self._mesh.replaced(life, error)  # then they went with it
