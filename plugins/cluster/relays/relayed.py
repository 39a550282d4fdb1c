"""Implement the tensor plane of several hosts: published tensors by relays, the rest by a store.

    put     of a key that many read: into this host's own memory; the returned key names the host
    get     mapped from this host's memory, whose relay gets it first (services.planes.relay)
    others  keys that few read go to the store, as every key does where this host has no relay

A reader whose relay is gone asks the other relays itself, and then the store. So a relay that dies
costs time and no publish.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cartridge_forge.actors.base import HOST
from cartridge_forge.plugins.cluster.relays.relay import AT, KeyRequest, RelayPlace, receive
from cartridge_forge.plugins.cluster.relays.relay_wire import ask
from cartridge_forge.plugins.host.plane import SharedMemoryPlane
from cartridge_forge.protocols.errors import ForgeError, PlaneError
from cartridge_forge.protocols.step import PUBLISHED, TensorRef
from cartridge_forge.services.planes.codec import missing_key, packed_bytes, unpack
from cartridge_forge.services.planes.open import OwnedPlane


class RelayedPlane:
    """Implement `protocols.ports.TensorPlane` over a store and the relays of `places`, in the order
    of the chain. A call has at most `timeout_s` seconds at each relay."""

    def __init__(self, store: OwnedPlane, places: Sequence[RelayPlace], timeout_s: float) -> None:
        self.store, self.places, self.timeout_s = store, tuple(places), timeout_s

    def __reduce__(self) -> tuple[type[RelayedPlane], tuple[Any, ...]]:
        return RelayedPlane, (self.store, self.places, self.timeout_s)

    async def stop(self) -> None:
        await self.store.stop()

    async def put(self, key: str, tensors: Mapping[str, torch.Tensor]) -> TensorRef:
        """Store a snapshot of the tensors, taken before the first await. The key of the returned
        reference is to be used from then on. Raises PlaneError if the key exists."""
        relay = self._own() if key.startswith(PUBLISHED) else None
        if relay is not None:
            plane = SharedMemoryPlane(relay.root)
            try:
                return await plane.put(f"{key}{AT}{relay.host}", tensors)
            except PlaneError:
                if plane.root.is_dir():
                    raise
        return await self.store.put(key, tensors)

    async def get(self, packet: TensorRef) -> dict[str, torch.Tensor]:
        """Return the ref's tensors. Raises PlaneError for a missing key or another layout."""
        if not _is_relayed(packet.key):
            return await self.store.get(packet)
        relay = self._own()
        if relay is None:
            return await asyncio.to_thread(self._received, packet, "")
        plane = SharedMemoryPlane(relay.root)
        try:
            return await plane.get(packet)
        except PlaneError:  # not on this host yet
            pass
        try:
            await asyncio.to_thread(self._fetch, packet, relay)
            return await plane.get(packet)
        except (OSError, ForgeError) as error:
            return await asyncio.to_thread(self._received, packet, str(error))

    async def delete(self, *keys: str) -> None:
        """Delete the keys on every host that is reached. Raises PlaneError for those on none."""
        relayed = [key for key in keys if _is_relayed(key)]
        missing = [key for key in relayed if not any(await self._ask_all({"delete": key}))]
        if stored := [key for key in keys if key not in relayed]:
            await self.store.delete(*stored)
        if missing:
            raise PlaneError(missing_key("delete", *missing))

    async def keys(self, prefix: str = "") -> list[str]:
        """Return the keys that start with `prefix`, sorted, of the store and of every host that is
        reached."""
        keys = {key for keys in await self._ask_all({"keys": prefix}) for key in keys}
        return sorted(keys | set(await self.store.keys(prefix)))

    def _own(self) -> RelayPlace | None:
        host = os.environ.get(HOST, "")
        return next((relay for relay in self.places if relay.host == host), None)

    def _chain(self, key: str) -> list[RelayPlace]:
        """Return the places in the order of the chain that begins where the key was put."""
        origin = key.rpartition(AT)[2]
        start = next((i for i, relay in enumerate(self.places) if relay.host == origin), 0)
        return [*self.places[start:], *self.places[:start]]

    def _fetch(self, packet: TensorRef, relay: RelayPlace) -> None:
        """Return once the key is in this host's memory."""
        chain = self._chain(packet.key)
        index, addresses = chain.index(relay), [relay_place.address for relay_place in chain]
        size = packed_bytes(packet.layout)
        request = KeyRequest(
            packet.key, size, size, index + 1, addresses[:index], addresses[index + 1 :],
            self.timeout_s,
        )  # fmt: skip
        receive(relay.address, request, lambda chunk: None)

    def _received(self, packet: TensorRef, why: str) -> dict[str, torch.Tensor]:
        """Return the tensors from any other host's relay, in memory of this process alone."""
        size, reasons = packed_bytes(packet.layout), [why] if why else []
        buffer, got = torch.empty(size, dtype=torch.uint8), 0
        into = memoryview(buffer.numpy().data)

        def write(chunk: memoryview) -> None:
            nonlocal got
            into[got : got + len(chunk)] = chunk
            got += len(chunk)

        for relay in self._chain(packet.key):
            request = KeyRequest(packet.key, size, got, len(self.places), seconds=self.timeout_s)
            try:
                receive(relay.address, request, write)
            except (OSError, ForgeError) as error:
                reasons.append(f"{relay.host or 'the store'}: {error}")
            if got == size:
                return unpack(buffer, packet.layout)
        raise PlaneError(
            f"get: no host has {packet.key!r} ({'; '.join(reasons) or 'there are no relays'})"
        )

    async def _ask_all(self, question: Mapping[str, Any]) -> list[Any]:
        """Return the replies of all relays that are reached."""

        def one(relay: RelayPlace) -> Any:
            return ask(relay.address, question)

        pending = (asyncio.to_thread(one, relay) for relay in self.places)
        replies = await asyncio.gather(*pending, return_exceptions=True)
        return [reply for reply in replies if not isinstance(reply, BaseException)]


def _is_relayed(key: str) -> bool:
    return key.startswith(PUBLISHED) and AT in key
