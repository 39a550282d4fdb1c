"""RSAAggregatorActor: judges populations of candidates, and says what the next ones are asked."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial

from monarch.actor import Actor, concurrent_endpoint

from environments.problems import open_problems
from protocols.rsa import AggregationInput, JudgedPopulation, RSAProblem
from protocols.spec.rsa import RsaSpec
from strategies.answers.equivalence import end_judge
from strategies.answers.extract import extract
from strategies.rsa.aggregator import aggregate
from strategies.rsa.islands import RSAShape
from strategies.rsa.prompts import as_task


class RSAAggregatorActor(Actor):
    """One of K that hold nothing between two calls: any of them goes on with any run, since a
    Standing says all of it (docs/adr/0007-rsa-aggregator.md).

    `service.spawn(RSAAggregatorActor, n=2, args=(spec,))`. Answers are compared and judged in
    processes below this one, which may hang or die of what a model wrote.
    """

    def __init__(self, spec: RsaSpec) -> None:
        self._shape, self._task = RSAShape(spec.M, spec.N, spec.K, spec.T), as_task(spec.task)
        self._problems = open_problems(spec.problems, partial(extract, form=self._task))

    @concurrent_endpoint
    async def ready(self) -> int:
        """This process's id."""
        return os.getpid()

    @concurrent_endpoint
    async def problems(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """The problems of these numbers, over the cartridge of `document`. Raises DataError for
        those that are not there."""
        return await self._problems.draw(numbers, document)

    @concurrent_endpoint
    async def turn(self, standings: Sequence[AggregationInput]) -> list[JudgedPopulation]:
        """Each run's last population judged, and its next one's prompts, in their order."""
        judge = self._problems.judge
        turns = (aggregate(s, self._shape, self._task, judge) for s in standings)
        return list(await asyncio.gather(*turns))

    async def __cleanup__(self, _: Exception | None) -> None:
        await self._problems.close()
        await asyncio.to_thread(end_judge)
