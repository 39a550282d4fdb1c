"""What a reader of cartridges holds after a load, and after one that the plane's loss ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cartridge_forge.actors.sdpo_teacher import SDPOTeacherActor
from cartridge_forge.learning.cartridge import CartridgeVersions
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    PublishedCartridge,
    TensorLayout,
    TensorRef,
)


class Plane:
    """Each key has "a", filled with the number of its gets so far; it may lack one key."""

    def __init__(self) -> None:
        self.lacks = ""
        self.gets: list[str] = []

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        if packet.key == self.lacks:
            raise PlaneError("the store is gone")
        self.gets.append(packet.key)
        return {"a": torch.full((1, 2, 1, 1, 1), float(len(self.gets)))}


def reader(plane: Plane) -> Any:
    actor: Any = SDPOTeacherActor.__new__(SDPOTeacherActor)
    actor._model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    actor._plane = plane
    actor._cartridges, actor._hinted = CartridgeVersions(2), CartridgeVersions(2)
    actor._reads_hints = actor._cartridges
    return actor


def load(actor: Any, version: int, own: str, hinted: str = "", since: int | None = None) -> None:
    def one(key: str) -> tuple[PublishedCartridge, ...]:
        at = version if since is None else since
        return (PublishedCartridge("a", at, TensorRef(key, TensorLayout(()))),) if key else ()

    endpoint: Any = SDPOTeacherActor.load
    asyncio.run(endpoint._method(actor, CartridgeSnapshot(version, one(own), one(hinted))))


def read(actor: Any, version: int) -> tuple[float, float]:
    """The cartridge, and what reads hints in its place."""
    held = (actor._cartridges, actor._reads_hints)
    own, hinted = (one.get("a", version).mean().item() for one in held)
    return own, hinted


def test_hints_are_read_by_their_own_cartridges_or_by_those_in_training() -> None:
    one, other = reader(Plane()), reader(Plane())
    load(one, 0, "own")
    assert read(one, 0) == (1.0, 1.0)
    load(other, 0, "own", "hinted")
    assert read(other, 0) == (1.0, 2.0)


def test_a_version_without_changes_gets_nothing() -> None:
    plane = Plane()
    actor = reader(plane)
    load(actor, 0, "own", "hinted")
    load(actor, 1, "own", "hinted", since=0)
    assert plane.gets == ["own", "hinted"]
    assert read(actor, 1) == read(actor, 0) == (1.0, 2.0)


def test_a_load_that_the_plane_s_loss_ended_is_repeated() -> None:
    """Half of it was there: were it held, its version could not be offered again."""
    plane = Plane()
    actor = reader(plane)
    plane.lacks = "hinted"
    with pytest.raises(PlaneError, match="the store is gone"):
        load(actor, 4, "own", "hinted")
    plane.lacks = ""
    load(actor, 4, "own again", "hinted")
    assert read(actor, 4) == (2.0, 3.0)
