"""What is in the tensor plane: published, deleted, swept, and back when the plane is lost."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_mesh import FakeProcess, House, house, run

from cartridge_forge.learning.cartridge import VersionLedger, get_missing, since_of
from cartridge_forge.protocols.errors import PlaneError, PublishError, RunError
from cartridge_forge.protocols.spec.mesh import RoleSpec
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    PublishedCartridge,
    TensorLayout,
    TensorRef,
)
from cartridge_forge.services import mesh as mesh_module
from cartridge_forge.services.mesh import Mesh
from cartridge_forge.training import weight_sync
from cartridge_forge.training.weight_sync import WeightSync

LAYOUT = TensorLayout((("kv", (5, 10), "float32"),))  # 200 bytes, in lines of 64: 256


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete what was read at the next `tidy`, however little it is."""
    monkeypatch.setattr(weight_sync, "TIDY_BYTES", 0)


class FakePlane:
    """Keys in the store's process, which take 0.01 s each way and go with it. A value maps a name
    to a version; `gets` are the keys that were got."""

    def __init__(self, process: FakeProcess | None) -> None:
        self.process = process
        self.held: dict[str, dict[str, int]] = {}
        self.gets: list[str] = []

    async def put(self, key: str, value: dict[str, int]) -> TensorRef:
        await self._reach()
        self.held[key] = value
        return TensorRef(key, LAYOUT)

    async def get(self, packet: TensorRef) -> dict[str, int]:
        self.gets.append(packet.key)
        await self._reach()
        if packet.key not in self.held:
            raise PlaneError(f"no tensor {packet.key}")
        return self.held[packet.key]

    async def delete(self, *keys: str) -> None:
        await self._reach()
        if missing := [key for key in keys if self.held.pop(key, None) is None]:
            raise PlaneError(f"no tensor {', '.join(missing)} to delete")

    async def keys(self, prefix: str = "") -> list[str]:
        await self._reach()
        return [k for k in self.held if k.startswith(prefix)]

    async def stop(self) -> None:
        await self._reach()

    async def _reach(self) -> None:
        await asyncio.sleep(0.01)
        if self.process is not None and self.process.ended_pid():
            raise PlaneError("the store is gone")


class Store:
    async def ready(self) -> int:
        return 1


class Trainer:
    """Publishes any version that it has `kept`: of each cartridge `since(version)`, those that the
    plane does not have. One cartridge that every step changes, if not said."""

    since: Callable[[int], dict[str, int]] = staticmethod(lambda version: {"a": version})

    def __init__(self, mesh: Mesh) -> None:
        self.plane = mesh.plane
        self.kept = set(range(10))
        self.count = itertools.count()
        self.seconds = 0.0
        self.off_by = 0
        self.hinted = False

    async def ready(self) -> int:
        return 1

    async def use_plane(self, plane: Any) -> None:
        self.plane = plane

    async def publish(self, version: int, before: CartridgeSnapshot | None) -> CartridgeSnapshot:
        await asyncio.sleep(self.seconds)
        if version not in self.kept:
            raise PublishError(f"version {version} cannot be published")
        key = f"cartridges/{version}/{next(self.count)}"
        there = before or CartridgeSnapshot(version, ())
        cartridges = await self.changed(key, version, there.cartridges)
        hinted = ()
        if self.hinted:
            hinted = await self.changed(f"{key}/hinted", version, there.hinted)
        return CartridgeSnapshot(version + self.off_by, cartridges, hinted)

    async def changed(
        self, key: str, version: int, before: Sequence[PublishedCartridge]
    ) -> tuple[PublishedCartridge, ...]:
        since = self.since(version)
        same = {c.name: c for c in before if c.since == since[c.name]}
        new = {name: v for name, v in since.items() if name not in same}
        packet = await self.plane.put(key, new) if new else None
        return tuple(same.get(n) or PublishedCartridge(n, v, packet) for n, v in since.items())


class Generator:
    def __init__(self, mesh: Mesh) -> None:
        self.plane = mesh.plane
        self.loaded: list[int] = []
        self.ledger = VersionLedger(3)
        self.seconds = 0.0

    async def ready(self) -> int:
        return 1

    async def use_plane(self, plane: Any) -> None:
        self.plane = plane

    async def load(self, snapshot: CartridgeSnapshot) -> None:
        await asyncio.sleep(self.seconds)
        since = since_of(snapshot.cartridges)
        new: dict[str, int] = await get_missing(
            self.plane.get, snapshot.cartridges, self.ledger.missing(since)
        )
        assert new.items() <= since.items()
        self.ledger.add(snapshot.version, since, new)
        self.loaded.append(snapshot.version)


class Environment:
    """Passes no tensors, as the environment's, the teachers' and the judges' actors."""

    async def ready(self) -> int:
        return 1


class World:
    """A mesh of a store, a trainer, two generators and an environment, none of them a process."""

    def __init__(self, h: House, mesh: Mesh, weights: WeightSync) -> None:
        self.h, self.mesh, self.weights = h, mesh, weights

    def process(self, role: str, slot: int = 0) -> FakeProcess:
        process: Any = self.mesh.pools[role].replicas[slot].process
        return process

    def actor(self, role: str, slot: int = 0) -> Any:
        return self.process(role, slot).actor

    @property
    def plane(self) -> FakePlane:
        plane: Any = self.mesh.plane
        return plane

    @property
    def held(self) -> Mapping[str, dict[str, int]]:
        return self.plane.held

    @property
    def versions(self) -> list[int]:
        """Of every packet in the plane: the newest of it."""
        return [max(packet.values()) for packet in self.held.values()]

    async def settled(self) -> None:
        await asyncio.sleep(3.0)
        for pool in self.mesh.pools.values():
            await pool.settled(5.0)
        assert not self.h.service.failure.done()


async def world(monkeypatch: pytest.MonkeyPatch, keep: int = 1, store: bool = True) -> World:
    async def open_plane(kind: str, procs: Any, timeout_s: float) -> FakePlane:
        await asyncio.sleep(0.05)
        return FakePlane(procs)

    monkeypatch.setattr(mesh_module, "open_plane", open_plane)
    h = house()
    spec: Any = SimpleNamespace(
        mesh=SimpleNamespace(carrier="torchstore", call_timeout_s=30.0, relays=False)
    )
    mesh = Mesh(h.service, spec, lambda event, **facts: None)
    if store:
        h.service.spawn(Store, role="store", spec=RoleSpec(), prepare=mesh.open_plane)
        await h.service.ready()
    else:
        await mesh.open_plane()
    h.service.spawn(Trainer, args=(mesh,), n=1)
    h.service.spawn(Generator, args=(mesh,), n=2)
    h.service.spawn(Environment, n=1)
    await h.service.ready()
    return World(h, mesh, WeightSync(mesh, keep))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_publish_reaches_every_generator_and_the_old_are_deleted(
    monkeypatch: pytest.MonkeyPatch, keep: int
) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep)
        for version in (3, 4, 5):
            await w.weights.publish(version)
            assert w.weights.moved_bytes == 256 * (1 + 2)  # put, and got by two generators
        await w.weights.tidied()
        assert w.versions == [4, 5][-keep:]
        for slot in (0, 1):
            assert w.actor("generator", slot).loaded == [3, 4, 5]
        # A successor is told those that are kept.
        w.process("generator").die()
        await w.settled()
        assert w.actor("generator").loaded == [4, 5][-keep:]
        await w.mesh.stop()

    run(scenario())


async def put_with_a_step(w: World, version: int) -> CartridgeSnapshot:
    """What a trainer does in its step: it puts `version`, and publishes nothing after it."""
    put: CartridgeSnapshot = await w.actor("trainer").publish(version, w.weights.ahead(version))
    w.actor("trainer").kept.clear()
    return put


def test_what_was_put_with_a_step_is_not_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch)
        w.actor("trainer").since = one_a_step
        await w.weights.publish(3)
        put = await put_with_a_step(w, 4)
        assert put.cartridges[1:] == w.weights._published[-1][1].cartridges[1:], "one has changed"
        w.weights.replica_lost()
        await w.weights.tidy()
        await w.weights.tidied()
        assert len(w.held) == 2, "a sweep spares what is put and not yet published"
        await w.weights.publish(4, put)
        await w.weights.tidied()
        assert w.weights.newest == 4
        assert [w.actor("generator", slot).loaded for slot in (0, 1)] == [[3, 4]] * 2
        assert len(w.held) == 2
        assert w.weights.moved_bytes == 256 * (1 + 2)
        await w.mesh.stop()

    run(scenario())


def test_what_a_lost_plane_had_with_a_step_is_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch)
        await w.weights.publish(3)
        put = await put_with_a_step(w, 4)
        w.actor("trainer").kept = {3, 4}
        w.process("store").die()
        await w.settled()
        await w.weights.publish(4, put)
        await w.weights.tidied()
        assert w.versions == [4]
        assert [w.actor("generator", slot).loaded[-1] for slot in (0, 1)] == [4, 4]
        await w.mesh.stop()

    run(scenario())


def one_a_step(version: int) -> dict[str, int]:
    """Of a, b, c and d, step v changes the v-th, counted round."""
    return {name: max(0, version - (version - i) % 4) for i, name in enumerate("abcd")}


def test_a_publish_moves_what_the_step_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cartridges, of which each step changes one. A packet stays while a published version
    needs any cartridge of it."""

    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        w.actor("trainer").since = one_a_step
        await w.weights.publish(0)
        assert list(w.held.values()) == [dict.fromkeys("abcd", 0)]
        for version, changed in ((1, "b"), (2, "c"), (3, "d"), (4, "a")):
            before = len(w.plane.gets)
            await w.weights.publish(version)
            assert list(w.held.values())[-1] == {changed: version}
            # One packet, put, and got by two generators that get nothing else.
            assert w.weights.moved_bytes == 256 * (1 + 2)
            assert w.plane.gets[before:] == [list(w.held)[-1]] * 2
        await w.weights.publish(5)
        await w.weights.tidied()
        # Version 4 has b since 1, and version 5 since 5; nobody needs the first packet any more.
        assert list(w.held.values()) == [{"b": 1}, {"c": 2}, {"d": 3}, {"a": 4}, {"b": 5}]
        await w.weights.publish(6)
        await w.weights.tidied()
        assert list(w.held.values()) == [{"c": 2}, {"d": 3}, {"a": 4}, {"b": 5}, {"c": 6}]
        # A successor, and one more, get all that the kept versions have, each packet once.
        w.process("generator").die()
        before = len(w.plane.gets)
        await w.settled()
        assert w.actor("generator").loaded == [5, 6]
        assert sorted(w.plane.gets[before:]) == sorted(w.held)
        w.mesh.pools["generator"].scale(3)
        await w.settled()
        for slot in (0, 1, 2):
            ledger = w.actor("generator", slot).ledger
            assert [ledger.since(name, 6) for name in "abcd"] == [4, 5, 6, 3]
            assert [ledger.since(name, 5) for name in "abcd"] == [4, 5, 2, 3]
        await w.mesh.stop()

    run(scenario())


def test_a_lost_plane_gets_what_versions_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        w.actor("trainer").since = one_a_step
        for version in range(7):
            await w.weights.publish(version)
        w.process("store").die()
        await w.settled()
        # Version 5 whole, then what version 6 has beside.
        assert list(w.held.values()) == [{"a": 4, "b": 5, "c": 2, "d": 3}, {"c": 6}]
        assert w.plane.gets == [], "who has the versions is told nothing"
        await w.weights.publish(7)
        assert w.weights.moved_bytes == 256 * (1 + 2)
        await w.weights.tidied()
        assert list(w.held.values()) == [
            {"a": 4, "b": 5, "c": 2, "d": 3}, {"c": 6}, {"d": 7},
        ]  # fmt: skip
        w.weights.replica_lost()
        await w.weights.tidy()
        await w.weights.tidied()
        assert len(w.held) == 3, "a sweep knows the packets of older versions"
        w.process("generator").die()
        await w.settled()
        assert w.actor("generator").loaded == [6, 7]
        await w.mesh.stop()

    run(scenario())


def test_what_reads_hints_goes_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A put and a get by the hinted teacher more; deleted with the version, known to a sweep, and
    published again with it into another plane."""

    async def scenario() -> None:
        w = await world(monkeypatch)
        w.h.service.spawn(Generator, role="sdpo_teacher", args=(w.mesh,), n=1, spec=RoleSpec())
        await w.h.service.ready()
        w.actor("trainer").hinted = True
        for version in (3, 4):
            await w.weights.publish(version)
            assert w.weights.moved_bytes == 256 * (1 + 3) + 256 * (1 + 1)
        w.weights.replica_lost()
        await w.weights.tidy()
        await w.weights.tidied()
        assert list(w.held) == ["cartridges/4/1", "cartridges/4/1/hinted"]
        w.process("store").die()
        await w.settled()
        assert list(w.held) == ["cartridges/4/2", "cartridges/4/2/hinted"]
        await w.mesh.stop()

    run(scenario())


def test_what_was_read_is_deleted_beside_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch)
        for key in ("scores/1", "scores/2", "scores/3"):
            await w.plane.put(key, {"score": 0})
        w.weights.read(TensorRef("scores/1", LAYOUT), 0)
        w.weights.read(TensorRef("scores/3", LAYOUT), 0)
        await w.weights.tidy()
        assert len(w.held) == 3, "nobody waited for it"
        await asyncio.sleep(0.015)
        assert set(w.held) == {"scores/2"}, "by one call, of 0.01 s"
        await w.weights.tidied()
        w.weights.read(TensorRef("scores/1", LAYOUT), 0)
        await w.weights.tidy()
        with pytest.raises(PlaneError, match="no tensor scores/1 to delete"):
            await w.weights.tidied()
        await w.mesh.stop()

    run(scenario())


def test_little_that_was_read_waits_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """768 bytes are deleted together: three keys of 256."""
    monkeypatch.setattr(weight_sync, "TIDY_BYTES", 768)

    async def scenario() -> None:
        w = await world(monkeypatch)
        for step, left in enumerate((1, 2, 0, 1)):
            await w.plane.put(f"scores/{step}", {"score": 0})
            w.weights.read(TensorRef(f"scores/{step}", LAYOUT), 0)
            await w.weights.tidy()
            await w.weights.tidied()
            assert len(w.held) == left
        w.weights.replica_lost()
        await w.plane.put("scores/lost with its teacher", {"score": 0})
        await w.weights.tidy()
        await w.weights.tidied()
        assert w.held == {}, "what a loss left goes at once, and the rest with it"
        await w.mesh.stop()

    run(scenario())


def test_a_sweep_after_a_loss_finds_what_nobody_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        await w.weights.publish(1)
        await w.weights.publish(2)
        await w.plane.put("scores/lost with its teacher", {"score": 0})
        await w.plane.put("scores/read", {"score": 0})
        await w.weights.tidy()
        await w.weights.tidied()
        assert len(w.held) == 4, "without a loss nobody looks"
        w.weights.replica_lost()
        w.weights.read(TensorRef("scores/read", LAYOUT), 0)
        await w.weights.tidy()
        await w.weights.tidied()
        assert sorted(w.versions) == [1, 2]
        await w.mesh.stop()

    run(scenario())


# Seconds from the call of publish: the trainer's work until 0.1, its put until 0.11, the
# generators' work until 0.21, their gets until 0.22.
@pytest.mark.parametrize("after", [0.05, 0.105, 0.15, 0.215])
def test_a_publish_whose_plane_is_lost_under_it_is_made_again(
    monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        await w.weights.publish(1)
        w.actor("trainer").seconds = 0.1
        for slot in (0, 1):
            w.actor("generator", slot).seconds = 0.1
        publishing = asyncio.create_task(w.weights.publish(2))
        await asyncio.sleep(after)
        w.process("store").die()
        await publishing
        assert w.weights.moved_bytes == 256 * (1 + 2)
        await w.settled()
        assert w.mesh.plane_life == 1
        assert sorted(w.versions) == [1, 2], "what is kept is in the new plane"
        for slot in (0, 1):
            assert w.actor("generator", slot).loaded == [1, 2], "told once"
        w.process("generator").die()
        await w.settled()
        assert w.actor("generator").loaded == [1, 2], "from the new plane, in order"
        await w.mesh.stop()

    run(scenario())


def test_a_lost_plane_is_filled_anew_under_new_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        for version in (3, 4):
            await w.weights.publish(version)
        w.weights.read(TensorRef("scores/4", LAYOUT), 0)
        before = set(w.held)
        w.process("store").die()
        await w.settled()
        assert w.versions == [3, 4]
        assert not set(w.held) & before
        await w.weights.publish(5)
        await w.weights.tidied()  # the scores went with the plane: not deleted a second time
        assert w.versions == [4, 5]
        await w.mesh.stop()

    run(scenario())


def test_a_plane_that_is_lost_while_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        for version in (3, 4):
            await w.weights.publish(version)
        w.actor("trainer").seconds = 1.0
        w.process("store").die()
        await asyncio.sleep(1.9)  # version 3 is there, version 4 under way
        assert w.mesh.plane_life == 1
        assert w.versions == [3]
        w.process("store").die()
        await asyncio.sleep(3.0)
        await w.settled()
        assert w.mesh.plane_life == 2
        assert w.versions == [3, 4]
        w.process("generator").die()
        await w.settled()
        assert w.actor("generator").loaded == [3, 4]
        await w.mesh.stop()

    run(scenario())


def test_what_the_trainer_has_no_more_is_told_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was replaced as well, and has the current version alone."""

    async def scenario() -> None:
        w = await world(monkeypatch, keep=2)
        for version in (3, 4):
            await w.weights.publish(version)
        w.actor("trainer").kept = {4, 5}
        w.process("store").die()
        w.process("generator").die()
        await w.settled()
        assert w.versions == [4]
        assert w.actor("generator").loaded == [4]
        await w.weights.publish(5)
        await w.weights.tidied()
        assert w.versions == [4, 5]
        await w.mesh.stop()

    run(scenario())


@pytest.mark.parametrize("store", [True, False])
def test_an_error_of_a_plane_that_is_well_means_what_it_says(
    monkeypatch: pytest.MonkeyPatch, store: bool
) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch, store=store)

        async def full(version: int, before: Any) -> CartridgeSnapshot:
            raise PlaneError("no space left")

        w.actor("trainer").publish = full
        with pytest.raises(PlaneError, match="no space left"):
            await w.weights.publish(1)
        await w.mesh.stop()

    run(scenario())


def test_a_plane_that_does_not_come_back_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch)
        w.h.processes.start_s = 100.0
        w.process("store").die()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(PlaneError, match="the store is gone"):
            await w.weights.publish(1)
        assert asyncio.get_running_loop().time() - begun == pytest.approx(30.0, abs=0.2)
        await w.mesh.stop()

    run(scenario())


def test_another_version_than_was_due_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        w = await world(monkeypatch)
        w.actor("trainer").off_by = 1
        with pytest.raises(RunError, match="published version 4 where 3 was due"):
            await w.weights.publish(3)
        assert w.actor("generator").loaded == []
        await w.mesh.stop()

    run(scenario())


def test_a_publish_that_is_lost_with_its_host_is_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where relays hand on: the store lives, and what the host had put is on no other host."""

    async def scenario() -> None:
        w = await world(monkeypatch)
        w.mesh.relays = SimpleNamespace(stop=lambda: asyncio.sleep(0))  # type: ignore[assignment]
        kept: list[int] = []

        async def keep(snapshot: CartridgeSnapshot) -> None:
            kept.append(snapshot.version)
            if len(kept) < 3:
                w.plane.held.clear()
                raise PlaneError("get: no host has it")

        monkeypatch.setattr(w.mesh, "keep", keep)
        await w.weights.publish(1)
        await w.weights.tidied()
        assert kept == [1, 1, 1]
        assert w.versions == [1]
        assert [w.actor("generator", slot).loaded for slot in (0, 1)] == [[1], [1]]

        async def never(snapshot: CartridgeSnapshot) -> None:
            kept.append(snapshot.version)
            raise PlaneError("get: no host has it")

        monkeypatch.setattr(w.mesh, "keep", never)
        with pytest.raises(PlaneError, match="no host has it"):
            await w.weights.publish(2)
        assert kept[3:] == [2] * 5
        await w.mesh.stop()

    run(scenario())
