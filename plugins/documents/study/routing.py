"""Measure the router on held-out questions: how often it finds a question's own cartridge, and what
the answers are worth over the cartridge that it finds.

arm on_policy    RoutedQuestions.own: over the own cartridge    -> routing accuracy, for nothing
arm routed       RoutedQuestions.chosen: over the router's      -> RememberedAnswers samples anew
                                                                   where that is another one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from cartridge_forge.plugins.documents.retrieval import Bm25Router, count_terms
from cartridge_forge.plugins.library.terms import Passages, write_terms
from cartridge_forge.plugins.statistics.intervals import wilson_interval
from cartridge_forge.plugins.statistics.results import RoutingAccuracy
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.training.records import GenerateCall


class RoutedQuestions:
    """Route questions over each cartridge's texts, and count each question once. `terms` are those
    of the texts."""

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        self.terms: dict[str, Passages] = {n: [*map(count_terms, t)] for n, t in texts.items()}
        self._right: dict[tuple[str, str], bool] = {}

    @cached_property
    def _router(self) -> Bm25Router:
        return Bm25Router(self.terms)

    def own(self, cartridge: str, question: str) -> str:
        """Return the question's own cartridge, and count whether the router finds it."""
        ranked = self._router.top(question, 1)
        self._right[cartridge, question] = bool(ranked) and ranked[0][0] == cartridge
        return cartridge

    def chosen(self, cartridge: str, question: str) -> str:
        """Return the router's choice, the first cartridge by name where it has none."""
        ranked = self._router.top(question, 1)
        return ranked[0][0] if ranked else self._router.names[0]

    def write(self, file: Path) -> None:
        """Write the terms of the texts, for those who use the cartridges."""
        write_terms(file, self.terms)

    def remembered(self, generate: GenerateCall) -> RememberedAnswers:
        """Return a call that generates each request once, whatever its id."""
        return RememberedAnswers(generate)

    @property
    def accuracy(self) -> RoutingAccuracy | None:
        """Return the share of questions whose own cartridge is found; None where none was asked, or
        only one cartridge could be found."""
        if not self._right or len(self._router.names) < 2:
            return None
        right, n = sum(self._right.values()), len(self._right)
        low, high = wilson_interval(right, n)
        return RoutingAccuracy(accuracy=right / n, ci95=[low, high], n=n)


class RememberedAnswers:
    """Generate each request once, whatever its id: a repeated one gets the completion that it had.
    It holds for requests of fixed seeds over versions that stay."""

    def __init__(self, generate: GenerateCall) -> None:
        self._generate = generate
        self._held: dict[GenerateRequest, Completion] = {}

    async def __call__(
        self, requests: Sequence[GenerateRequest], replied: object = None, *, whole: bool = False
    ) -> list[Completion]:
        """Return completions in order. Nobody is told of replies."""
        keys = [replace(request, id="") for request in requests]
        pairs = zip(keys, requests, strict=True)
        fresh = {key: request for key, request in pairs if key not in self._held}
        answers = await self._generate(list(fresh.values()), None, whole=whole) if fresh else []
        self._held.update(zip(fresh, answers, strict=True))
        pairs = zip(keys, requests, strict=True)
        return [replace(self._held[key], request_id=r.id) for key, r in pairs]
