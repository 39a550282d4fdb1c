"""Call the role that aggregates populations of answers."""

from __future__ import annotations

from collections.abc import Sequence

from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedPopulation,
    RSAProblem,
)
from cartridge_forge.services.clients import RoleClient


class RSAAggregatorClient(RoleClient):
    """Draw problems, judge populations and build the requests of the next population."""

    role = "rsa_aggregator"

    async def turn(self, standings: Sequence[AggregationInput]) -> list[JudgedPopulation]:
        """Return each run's last population, judged, with the requests of its next one, in
        order."""

        async def share(inputs_share: Sequence[AggregationInput]) -> list[JudgedPopulation]:
            judged: list[JudgedPopulation] = await self.pool.route("turn", tuple(inputs_share))
            return judged

        return await self.pool.split(standings, share)

    async def problems(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """Return the problems of these numbers, over the cartridge of `document`. Raises DataError
        for a number that does not exist."""
        problems: list[RSAProblem] = await self.pool.route("problems", tuple(numbers), document)
        return problems
