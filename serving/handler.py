"""Answer one request: admit it, hold its cartridges, and yield its responses piece by piece.

    begin   parsing -> admission -> cartridges loaded in the generators -> AnswerContext
    pieces  (choice, piece), ... as tokens are sampled; then `usage`, `forge`, `completions` are set
    close   cancel what still decodes, then release the cartridges and the admission

The deadline counts from the end of parsing. The caller of `begin` must call `close`, also after an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from environments.renderer import NO_DOCUMENT
from protocols.errors import DataError, ForgeError, RunError
from protocols.types import Completion, PrefixRef, TokenChunk, composed_ref
from protocols.wire.openai_chat import (
    CartridgeInfo,
    ForgeExtension,
    RoutedInfo,
    StrategyInfo,
    usage,
)
from serving.admission import Admission
from serving.backend import ServerConfig
from serving.detokenizer import Detokenizer, TextPiece
from serving.errors import ApiError
from serving.metrics import ServingMetrics
from serving.middleware import end
from serving.request import ServingRequest, StrategyRequest, requests_of
from serving.request_parsing import RequestParser
from serving.resident_cartridges import ResidentCartridges

Body = TypeVar("Body")
CARTRIDGE_HEADER = "x-forge-cartridge"
BARE = PrefixRef(f"document/{NO_DOCUMENT}", 0)


class RequestHandler:
    """Begin requests, with the parser, the generators' cartridges and the admission limit of one
    server. Call `close` after the last request."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, self.parser = config, RequestParser(config)
        self.admission = Admission(config.http.max_pending)
        self.metrics = ServingMetrics(lambda: self.admission.pending, config.backend.depth)
        self.cartridges = ResidentCartridges(config.backend, config.held_cartridges)
        # One thread: a tokenizer is not thread-safe, and its work must not hold the event loop up.
        self._parsing = ThreadPoolExecutor(1, "parsing")

    async def close(self) -> None:
        await self.cartridges.close()
        self._parsing.shutdown(wait=False, cancel_futures=True)

    async def begin(self, body: Body, parse: Callable[[Body], ServingRequest]) -> AnswerContext:
        """Return the context of an admitted request, with its cartridges loaded. Raises ApiError
        for a malformed request, a full queue, a cartridge that cannot be loaded, or a deadline that
        passed."""
        loop = asyncio.get_running_loop()
        request = await loop.run_in_executor(self._parsing, parse, body)
        deadline = loop.time() + self.config.http.deadline_s
        if request.strategy is not None:
            with self.api_errors("forge.options"):
                self.config.strategies.check(request.strategy)
        async with AsyncExitStack() as held:
            held.enter_context(self.admission.let_in(request.responses))
            with self.api_errors():
                async with asyncio.timeout_at(deadline):
                    using = [self.cartridges.using(entry) for entry in request.entries]
                    parts = [await held.enter_async_context(part) for part in using]
            if request.routed is not None:
                self.metrics.routed(request.routed.entry.manifest.name)
            prefix = composed_ref(parts) if parts else BARE
            return AnswerContext(self, request, prefix, held.pop_all(), deadline)

    @contextlib.contextmanager
    def api_errors(self, param: str | None = None) -> Iterator[None]:
        """Raise errors of the block as ApiError."""
        try:
            yield
        except DataError as error:
            raise ApiError(400, str(error), param=param) from error
        except RunError as error:
            raise ApiError(503, str(error), code="generators_unavailable") from error
        except ForgeError as error:
            raise ApiError(503, str(error), code="cartridge_unavailable") from error
        except TimeoutError as error:
            late = (
                f"no whole answer within {self.config.http.deadline_s:g} s; ask for fewer tokens, "
                "or raise http.deadline_s where the server is configured"
            )
            raise ApiError(504, late, code="deadline_exceeded") from error


class AnswerContext:
    """Hold the state of a request that is being answered; `close` closes `held`."""

    def __init__(
        self,
        handler: RequestHandler,
        request: ServingRequest,
        prefix: PrefixRef,
        held: AsyncExitStack,
        deadline: float,
    ) -> None:
        self.request, self.created = request, int(time.time())
        self.usage = usage(request.prompt_tokens, 0)
        self.completions: Sequence[Completion] = ()
        used = [
            CartridgeInfo(name=name, version=version, tokens=entry.manifest.tokens)
            for entry in request.entries
            for name, version in [entry.key]
        ]
        named: dict[str, Any] = {}
        if used:
            named = {"cartridge": used[0]} if len(used) == 1 else {"cartridges": used}
        if request.routed is not None:
            why = request.routed.why
            named["routed"] = RoutedInfo(
                score=why.score, runner_up=why.runner_up, runner_up_score=why.runner_up_score
            )
        self.forge = ForgeExtension(
            seed=request.seed, cartridge_tokens=request.cartridge_tokens, **named
        )
        self._handler, self._prefix, self._held, self._deadline = handler, prefix, held, deadline

    async def close(self) -> None:
        await self._held.aclose()

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that names the cartridges before the prompt, {} for none."""
        used = [f"{name}@{version}" for name, version in (e.key for e in self.request.entries)]
        return {CARTRIDGE_HEADER: ",".join(used)} if used else {}

    def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield (choice, piece) as tokens are sampled; the last piece of a choice has a
        finish_reason. Raises ApiError."""
        strategy = self.request.strategy
        return self._sampled() if strategy is None else self._by_strategy(strategy)

    async def _sampled(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield responses sampled directly from the generators."""
        handler, config, request = self._handler, self._handler.config, self.request
        calls = requests_of(request, self._prefix)
        index = {call.id: i for i, call in enumerate(calls)}
        texts = [Detokenizer(config.texts.decode, request.stops, config.end_ids) for _ in calls]
        queue: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        begun, first = time.monotonic(), True
        on_tokens = queue.put_nowait if request.stream else None
        work = asyncio.create_task(config.backend.generate(calls, on_tokens))
        self._held.push_async_callback(end, work)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        while True:
            with handler.api_errors():
                async with asyncio.timeout_at(self._deadline):
                    chunk = await queue.get()
            if chunk is None:
                break
            if first:
                handler.metrics.first_token(time.monotonic() - begun)
                first = False
            choice = index[chunk.request_id]
            piece = texts[choice].feed(chunk)
            if piece.text or piece.tokens:
                yield choice, piece
        with handler.api_errors():
            self.completions = work.result()
        for completion in self.completions:
            if completion.finish_reason in ("error", "cancelled"):
                why = completion.error or "the generators ended it"
                raise ApiError(503, f"a response could not be sampled: {why}", code="refused")
        last = [text.finish(c) for text, c in zip(texts, self.completions, strict=True)]
        self._count(request.prompt_tokens, sum(len(c.token_ids) for c in self.completions))
        for choice, piece in enumerate(last):
            yield choice, piece

    async def _by_strategy(
        self, strategy: StrategyRequest
    ) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield the result of a strategy, as one choice in one piece."""
        with self._handler.api_errors("forge.options"):
            async with asyncio.timeout_at(self._deadline):
                result = await self._handler.config.strategies.run(self.request, self._prefix)
        spent = result.spent
        info = StrategyInfo(
            name=strategy.name, options=dict(strategy.options), answer=result.answer,
            tokens=spent.tokens, prompt_tokens=spent.prompt_tokens, calls=spent.calls,
            asks=spent.asks, seconds=round(spent.seconds, 6), details=dict(result.details),
        )  # fmt: skip
        self.forge = self.forge.model_copy(update={"strategy": info})
        # Count all tokens that the strategy's calls read and sampled, not only the answer's.
        self._count(spent.prompt_tokens, spent.tokens)
        cut = result.finish_reason in ("length", "budget")
        yield 0, TextPiece(result.text, (), "length" if cut else "stop")

    def _count(self, read: int, sampled: int) -> None:
        self.usage = usage(read, sampled)
        self._handler.metrics.tokens(read, sampled)
