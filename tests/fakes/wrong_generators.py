"""Generators whose labels are right and whose cartridges are not, from version 1 on.

An `Echo` also answers with the fingerprints that it was told, so that only its log-probabilities
show what it did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from monarch.actor import endpoint
from torch import Tensor

from cartridge_forge.actors.generator import GeneratorActor
from cartridge_forge.learning.cartridge import since_of
from cartridge_forge.learning.decode import generate
from cartridge_forge.protocols.step import (
    CARTRIDGE,
    CartridgeSnapshot,
    GenerateOutput,
    GenerateRequest,
    PrefixRef,
)


class WrongGenerator(GeneratorActor):
    """Reads what `wrong` returns in the place of every cartridge of a version after the first."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._first: dict[str, Tensor] = {}
        self._told: dict[tuple[str, int], str] = {}
        self._calls = 0

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        new = self.filed(
            await self._cartridges.fetch(self._plane.get, snapshot.cartridges, self._model)
        )
        self._cartridges.add(snapshot.version, since_of(snapshot.cartridges), new)
        for c in snapshot.cartridges:
            self._told[c.name, snapshot.version] = c.fingerprint
            self._first.setdefault(c.name, self._cartridges.get(c.name, snapshot.version))
        return snapshot.version

    def filed(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        return new

    def wrong(self, name: str, version: int) -> Tensor:
        raise NotImplementedError

    def _single(self, ref: PrefixRef) -> Tensor:
        if ref.name.startswith(CARTRIDGE) and ref.version > 0:
            return self.wrong(ref.name.removeprefix(CARTRIDGE), ref.version)
        return super()._single(ref)


class FilesFirst(WrongGenerator):
    """Files version 0's numbers under every new label."""

    def filed(self, new: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._first.get(name, kv) for name, kv in new.items()}

    def wrong(self, name: str, version: int) -> Tensor:
        return self._cartridges.get(name, version)


class IgnoresUpdates(WrongGenerator):
    """Loads every version and reads the first for ever."""

    def wrong(self, name: str, version: int) -> Tensor:
        return self._first[name]


class MixesLayers(WrongGenerator):
    """Reads the upper half of the layers from the version before."""

    def wrong(self, name: str, version: int) -> Tensor:
        new, old = self._cartridges.get(name, version), self._cartridges.get(name, version - 1)
        half = len(new) // 2
        return torch.cat([new[:half], old[half:]])


class MixesRequests(WrongGenerator):
    """Reads the version before for every second prefix that it is asked about."""

    def wrong(self, name: str, version: int) -> Tensor:
        self._calls += 1
        return self._cartridges.get(name, version - self._calls % 2)


class OtherCartridge(WrongGenerator):
    """Reads another document's cartridge of the same version."""

    def wrong(self, name: str, version: int) -> Tensor:
        names = sorted(self._first)
        other = names[(names.index(name) + 1) % len(names)]
        return self._cartridges.get(other, version)


class Echo(WrongGenerator):
    """Answers with the fingerprints that were published."""

    def _served(self, ref: PrefixRef, kv: Tensor) -> tuple[str, ...]:
        parts = [(p.name.removeprefix(CARTRIDGE), p.version) for p in ref.parts]
        return tuple(self._told.get(part, "") for part in parts)


class EchoFilesFirst(Echo, FilesFirst):
    pass


class EchoIgnoresUpdates(Echo, IgnoresUpdates):
    pass


class EchoMixesLayers(Echo, MixesLayers):
    pass


class EchoMixesRequests(Echo, MixesRequests):
    pass


class EchoOtherCartridge(Echo, OtherCartridge):
    pass


class Silent(WrongGenerator):
    """Returns neither fingerprints nor log-probabilities, and decodes over the right numbers."""

    evidence = frozenset()

    @endpoint
    async def generate(self, requests: Sequence[GenerateRequest]) -> GenerateOutput:
        done = generate(self._model, requests, self._lookup, self._end_ids, self._text)
        return GenerateOutput(0.0, tuple(replace(c, logprobs=()) for c in done))

    def wrong(self, name: str, version: int) -> Tensor:
        return self._cartridges.get(name, version)


class SilentIgnoresUpdates(Silent):
    """The same, over the first version's for ever."""

    def wrong(self, name: str, version: int) -> Tensor:
        return self._first[name]


class SilentOtherCartridge(OtherCartridge, Silent):
    pass
