"""Score hinted turns, and compute references of preference pairs, with published cartridges."""

from __future__ import annotations

import time
from collections.abc import Sequence

from monarch.actor import endpoint
from torch import Tensor

from cartridge_forge.actors.base import ModelSource
from cartridge_forge.actors.model import ModelActor
from cartridge_forge.learning.cartridge import CartridgeVersions, Fingerprints, since_of
from cartridge_forge.learning.ranks import engine_errors
from cartridge_forge.learning.teacher import score_kept
from cartridge_forge.plugins.objectives.policy_scores import with_references
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    PreferencePair,
    ReferenceOutput,
    Sample,
    ScoreOutput,
    unique_key,
)


class SDPOTeacherActor(ModelActor):
    """Hold the last few published cartridge versions, as a generator does, and beside each the
    cartridges that read hints in its place, where the run publishes them."""

    def __init__(
        self, base: ModelSource, row_tokens: int, keep_top: int | None, keep_versions: int
    ) -> None:
        """Send `keep_top` entries a token, or all logits for None."""
        super().__init__(base)
        self._cartridges = CartridgeVersions(keep_versions)
        self._fingerprints = Fingerprints()
        self._row_tokens = row_tokens
        self._keep_top = keep_top
        self._hinted = CartridgeVersions(keep_versions)
        self._reads_hints = self._cartridges

    @endpoint
    async def load(self, snapshot: CartridgeSnapshot) -> int:
        """Load what is not held of a published version, with those that read hints."""
        # Both before either is added: a call that a lost plane ends is repeated.
        get, model = self._plane.get, self._model
        new = await self._cartridges.fetch(get, snapshot.cartridges, model)
        hinted = await self._hinted.fetch(get, snapshot.hinted, model)
        self._cartridges.add(snapshot.version, since_of(snapshot.cartridges), new)
        if snapshot.hinted:
            self._hinted.add(snapshot.version, since_of(snapshot.hinted), hinted)
            self._reads_hints = self._hinted
        return snapshot.version

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample], version: int) -> ScoreOutput:
        """Put the distributions over every response token of hinted turns under a key of this stem:
        with the cartridges that read hints at `version`, each sample's context before its own
        tokens."""
        start = time.perf_counter()
        prefixes = self._prefixes(self._reads_hints, [s.cartridge for s in samples], version)
        with engine_errors():
            tensors = score_kept(self._model, samples, prefixes, self._row_tokens, self._keep_top)
        served = {name: self._fingerprints.fingerprint(kv) for name, kv in prefixes.items()}
        seconds = time.perf_counter() - start
        self._freed.give_back()
        packet = await self._plane.put(unique_key(stem), tensors)
        return ScoreOutput(seconds, packet, len(next(iter(tensors.values()))), served=served)

    @endpoint
    async def references(self, pairs: Sequence[PreferencePair], version: int) -> ReferenceOutput:
        """Return the pairs with reference log-probabilities of `version`."""
        start = time.perf_counter()
        prefixes = self._prefixes(self._cartridges, [p.cartridge for p in pairs], version)
        with engine_errors():
            referred = with_references(self._model, pairs, prefixes, self._row_tokens, version, 0)
        return ReferenceOutput(time.perf_counter() - start, tuple(referred))

    def _prefixes(
        self, versions: CartridgeVersions, documents: Sequence[str], version: int
    ) -> dict[str, Tensor]:
        return {name: versions.get(name, version) for name in sorted(set(documents))}
