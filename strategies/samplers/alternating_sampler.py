"""Sample in turns over several prefixes, so that candidates know different things."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from strategies.samplers.sampler import Ability, Sampler, SampleRequest, SampleResult


class AlternatingSampler:
    """Serve request i of a call by sampler i modulo their number."""

    def __init__(self, samplers: Sequence[Sampler]) -> None:
        self._samplers = tuple(samplers)
        self.abilities: frozenset[Ability] = frozenset.intersection(
            *(sampler.abilities for sampler in self._samplers)
        )

    async def __call__(self, asks: Sequence[SampleRequest]) -> list[SampleResult]:
        """Return the results in the requests' order. Raises what the samplers raise."""
        turns = len(self._samplers)
        shares = [list(asks[turn::turns]) for turn in range(turns)]
        answered = await asyncio.gather(
            *(sampler(share) for sampler, share in zip(self._samplers, shares, strict=True))
        )
        return [answered[i % turns][i // turns] for i in range(len(asks))]
