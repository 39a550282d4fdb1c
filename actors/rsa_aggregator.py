"""Judge populations of RSA candidates, and make the prompts of the next ones."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial

from monarch.actor import Actor, concurrent_endpoint

from cartridge_forge.plugins.environments.problems import open_problems
from cartridge_forge.plugins.rsa.spec import RsaSpec
from cartridge_forge.plugins.strategies.answers.equivalence import end_judge
from cartridge_forge.plugins.strategies.answers.extract import extract, plain_answer
from cartridge_forge.plugins.strategies.rsa.islands import RSAShape
from cartridge_forge.plugins.strategies.rsa.populations import (
    AggregationInput,
    JudgedPopulation,
    RSAProblem,
    aggregate,
)
from cartridge_forge.plugins.strategies.rsa.prompts import as_task


class RSAAggregatorActor(Actor):
    """Run one of K stateless replicas. An AggregationInput holds all of a run's state, so any
    replica can continue any run (docs/adr/0007-rsa-aggregator.md).

    `service.spawn(RSAAggregatorActor, n=2, args=(spec,))`. Answers are compared and judged in child
    processes, because model-written text may make them hang or die.
    """

    def __init__(self, spec: RsaSpec) -> None:
        self._shape, self._task = RSAShape(spec.M, spec.N, spec.K, spec.T), as_task(spec.task)
        self._problems = open_problems(
            spec.problems, partial(extract, form=self._task), partial(plain_answer, form=self._task)
        )

    @concurrent_endpoint
    async def ready(self) -> int:
        """Return this process's id."""
        return os.getpid()

    @concurrent_endpoint
    async def problems(self, numbers: Sequence[int], document: str) -> list[RSAProblem]:
        """Return the problems of these numbers, over the cartridge of `document`. Raises DataError
        for unknown numbers."""
        return await self._problems.draw(numbers, document)

    @concurrent_endpoint
    async def turn(self, standings: Sequence[AggregationInput]) -> list[JudgedPopulation]:
        """Return for each run, in order, the judged last population and the next prompts."""
        judge = self._problems.judge
        turns = (aggregate(s, self._shape, self._task, judge) for s in standings)
        return list(await asyncio.gather(*turns))

    async def __cleanup__(self, _: Exception | None) -> None:
        await self._problems.close()
        await asyncio.to_thread(end_judge)
