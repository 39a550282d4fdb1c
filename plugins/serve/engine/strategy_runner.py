"""Run strategies over the generators, each in a thread with its own event loop.

    server's event loop    run -> thread -> result
    thread's event loop    strategy -> TokenSampler -> generate ---> server's event loop: backend

Between its calls a strategy compares answers and scores steps, which may take seconds. The thread
keeps other requests from waiting for that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar, cast

from cartridge_forge.plugins.serve.backend import Backend
from cartridge_forge.plugins.serve.request import ServingRequest, StrategyRequest, chat_date
from cartridge_forge.plugins.serve.tokenization import STAND_IN, Tokenization
from cartridge_forge.plugins.strategies.answers.extract import FORMS, Form
from cartridge_forge.plugins.strategies.catalog import STRATEGIES, parse, run
from cartridge_forge.plugins.strategies.problem import Judge, StrategyCost, StrategyResult
from cartridge_forge.plugins.strategies.samplers.token_sampler import TokenSampler
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

T = TypeVar("T")

PATTERNS = frozenset({"step_patterns", "answer_patterns"})
THREADS = 32  # strategies at a time; others wait


class CatalogueStrategies:
    """Run every strategy of `plugins.strategies.catalog`. `judge` serves the scorer process_reward,
    in the server's event loop."""

    def __init__(self, backend: Backend, texts: Tokenization, judge: Judge | None = None) -> None:
        self._backend, self._texts, self._judge = backend, texts, judge
        self._threads = ThreadPoolExecutor(THREADS, "strategy")

    def names(self) -> list[str]:
        return list(STRATEGIES)

    def cost(self, strategy: StrategyRequest) -> StrategyCost:
        if strategy.form not in FORMS:
            raise DataError(f"forge.form is one of {', '.join(FORMS)}: got {strategy.form!r}")
        detector = strategy.options.get("detector")
        if isinstance(detector, Mapping) and not PATTERNS.isdisjoint(detector):
            raise DataError(
                "forge.options.detector: patterns are not taken over the wire, for one that "
                "backtracks for ever would hold a generator up; leave out "
                f"{', '.join(sorted(PATTERNS & set(detector)))}, or run the strategy from Python"
            )
        parsed = parse(strategy.name, strategy.options)
        if getattr(parsed, "scorer", None) == "process_reward" and self._judge is None:
            raise DataError(
                "forge.options.scorer: process_reward is not configured here; take another scorer, "
                "or set process_reward where the server is configured"
            )
        return parsed.cost()

    async def run(self, request: ServingRequest, prefix: PrefixRef) -> StrategyResult:
        """Return the result, which is the same for the same seed. Cancelling this ends its
        decoding."""
        assert request.strategy is not None
        loop, calls = asyncio.get_running_loop(), itertools.count()

        async def generate(requests: Sequence[GenerateRequest]) -> list[Completion]:
            call = next(calls)  # request ids of two strategies may be equal
            named = [replace(r, id=f"{request.id}/{call}/{r.id}") for r in requests]
            work = asyncio.run_coroutine_threadsafe(self._backend.generate(named), loop)
            return await asyncio.wrap_future(work)

        judge = self._judge

        async def judged(texts: Sequence[str]) -> Sequence[float]:
            assert judge is not None
            scoring = asyncio.run_coroutine_threadsafe(_awaited(judge(texts)), loop)
            return await asyncio.wrap_future(scoring)

        # Its own, as strategies run in threads beside each other.
        conversation = self._texts.renderer(chat_date(request.entries))
        document = STAND_IN if request.entries else None
        sampling, wanted = request.sampling, request.strategy
        solving = run(
            parse(wanted.name, wanted.options),
            TokenSampler(generate, conversation, document, prefix),
            request.messages,
            form=cast(Form, wanted.form),
            seed=request.seed,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            budget=wanted.budget,
            judge=None if judge is None else judged,
        )
        return await _apart(self._threads, solving)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _apart(threads: ThreadPoolExecutor, work: Coroutine[Any, Any, T]) -> T:
    """Return the outcome of `work`, run in a thread's event loop and cancelled with this call."""
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = []

    async def cancellable() -> T:
        task = asyncio.ensure_future(work)
        tasks.append((asyncio.get_running_loop(), task))
        return await task

    running = threads.submit(lambda: asyncio.run(cancellable()))
    try:
        return await asyncio.wrap_future(running)
    except asyncio.CancelledError:
        if tasks:
            loop, task = tasks[0]
            loop.call_soon_threadsafe(task.cancel)
        else:
            work.close()
        raise
