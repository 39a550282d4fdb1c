"""Score with the student's model and cartridges over a context that the student did not have.

The context is a hint before the turn that went wrong (SDPO), or a teacher's preferred action in
place of the student's (the reference of replay DPO).
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from monarch.actor import endpoint
from torch import Tensor

from actors.base import ModelSource, fresh_key
from actors.model_actor import CartridgeReaderActor
from learning.scoring import score_kept, with_references
from protocols.train_batch import PreferencePair
from protocols.types import Sample, ScoreOutput


class SDPOTeacherActor(CartridgeReaderActor):
    """Hold the last few published cartridge versions, as a generator does."""

    def __init__(
        self, base: ModelSource, row_tokens: int, keep_top: int | None, keep_versions: int
    ) -> None:
        """Send `keep_top` entries a token, or all logits for None."""
        super().__init__(base, keep_versions)
        self._row_tokens = row_tokens
        self._keep_top = keep_top

    @endpoint
    async def score(self, stem: str, samples: Sequence[Sample], version: int) -> ScoreOutput:
        """Put the distributions over every response token of hinted turns under a key of this stem:
        with the cartridges of `version`, each sample's context before its own tokens."""
        begun = time.perf_counter()
        prefixes = self._prefixes([s.document for s in samples], version)
        tensors = score_kept(self._model, samples, prefixes, self._row_tokens, self._keep_top)
        seconds = time.perf_counter() - begun
        packet = await self._plane.put(fresh_key(stem), tensors)
        return ScoreOutput(seconds, packet, len(next(iter(tensors.values()))))

    @endpoint
    async def references(
        self, pairs: Sequence[PreferencePair], version: int
    ) -> list[PreferencePair]:
        """Return the pairs with reference log-probabilities of `version`."""
        prefixes = self._prefixes([p.document for p in pairs], version)
        return with_references(self._model, pairs, prefixes, self._row_tokens, version, 0)

    def _prefixes(self, documents: Sequence[str], version: int) -> dict[str, Tensor]:
        return {name: self._cartridges.get(name, version) for name in sorted(set(documents))}
