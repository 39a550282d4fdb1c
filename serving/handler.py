"""Answer one request: admit it, hold its cartridges, and yield its responses piece by piece.

    begin   admission -> cartridges loaded in the generators -> AnswerContext
    pieces  (choice, piece), ... as tokens are sampled; then `usage`, `forge`, `completions` are set
    close   cancel what still decodes, then release the cartridges and the admission

The deadline counts from `begin`. The caller of `begin` must call `close`, also after an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from environments.renderer import NO_DOCUMENT
from protocols.errors import DataError, ForgeError, RunError
from protocols.types import Completion, PrefixRef, TokenChunk, composed_ref
from protocols.wire.openai_chat import CartridgeInfo, ForgeExtension, StrategyInfo, usage
from serving.admission import Admission
from serving.backend import Backend, StrategyCatalog
from serving.detokenizer import Detokenizer, TextPiece
from serving.errors import ApiError
from serving.metrics import ServingMetrics
from serving.middleware import end
from serving.request import ServingRequest, requests_of
from serving.resident_cartridges import ResidentCartridges
from serving.tokenization import Tokenization

BARE = PrefixRef(f"document/{NO_DOCUMENT}", 0)


@dataclass(frozen=True)
class RequestHandler:
    """Begin requests, given the generators, their resident cartridges and the admission limit."""

    backend: Backend
    texts: Tokenization
    shelf: ResidentCartridges
    admission: Admission
    metrics: ServingMetrics
    strategies: StrategyCatalog
    end_ids: frozenset[int]
    deadline_s: float

    async def begin(self, asked: ServingRequest) -> AnswerContext:
        """Return the context of an admitted request, with its cartridges loaded. Raises ApiError
        for a full queue, a cartridge that cannot be loaded, or a deadline that passed."""
        deadline = asyncio.get_running_loop().time() + self.deadline_s
        if asked.strategy is not None:
            with self.api_errors("forge.options"):
                self.strategies.check(asked.strategy)
        async with AsyncExitStack() as held:
            held.enter_context(self.admission.let_in(asked.responses))
            with self.api_errors():
                async with asyncio.timeout_at(deadline):
                    using = [self.shelf.using(entry) for entry in asked.entries]
                    parts = [await held.enter_async_context(part) for part in using]
            prefix = composed_ref(parts) if parts else BARE
            kind = PlainAnswer if asked.strategy is None else StrategyAnswer
            return kind(self, asked, prefix, held.pop_all(), deadline)

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
            raise ApiError(
                504,
                f"no whole answer within {self.deadline_s:g} s; ask for fewer tokens, or raise "
                "http.deadline_s where the server is configured",
                code="deadline_exceeded",
            ) from error


class AnswerContext:
    """Hold the state of a request that is being answered; `close` closes `held`."""

    def __init__(
        self,
        desk: RequestHandler,
        asked: ServingRequest,
        prefix: PrefixRef,
        held: AsyncExitStack,
        deadline: float,
    ) -> None:
        self.asked, self.created = asked, int(time.time())
        self.usage = usage(asked.prompt_tokens, 0)
        self.completions: Sequence[Completion] = ()
        told = [
            CartridgeInfo(name=name, version=version, tokens=entry.manifest.tokens)
            for entry in asked.entries
            for name, version in [entry.key]
        ]
        named = {"cartridge": told[0]} if len(told) == 1 else {"cartridges": told} if told else {}
        self.forge = ForgeExtension(
            seed=asked.seed, cartridge_tokens=asked.cartridge_tokens, **named
        )
        self._desk, self._prefix, self._held, self._deadline = desk, prefix, held, deadline

    def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield (choice, piece) as tokens are sampled; the last piece of a choice has a
        finish_reason. Raises ApiError."""
        raise NotImplementedError

    async def close(self) -> None:
        await self._held.aclose()


class PlainAnswer(AnswerContext):
    """Answer with responses sampled directly from the generators."""

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        desk, asked = self._desk, self.asked
        requests = requests_of(asked, self._prefix)
        index = {r.id: i for i, r in enumerate(requests)}
        tellers = [Detokenizer(desk.texts.decode, asked.stops, desk.end_ids) for _ in requests]
        queue: asyncio.Queue[TokenChunk | None] = asyncio.Queue()
        begun, first = time.monotonic(), True
        told = queue.put_nowait if asked.stream else None
        work = asyncio.create_task(desk.backend.generate(requests, told))
        self._held.push_async_callback(end, work)
        work.add_done_callback(lambda _: queue.put_nowait(None))
        while True:
            with desk.api_errors():
                async with asyncio.timeout_at(self._deadline):
                    came = await queue.get()
            if came is None:
                break
            if first:
                desk.metrics.first_token(time.monotonic() - begun)
                first = False
            choice = index[came.request_id]
            piece = tellers[choice].feed(came)
            if piece.text or piece.tokens:
                yield choice, piece
        with desk.api_errors():
            self.completions = work.result()
        for completion in self.completions:
            if completion.finish_reason in ("error", "cancelled"):
                why = completion.error or "the generators ended it"
                raise ApiError(503, f"a response could not be sampled: {why}", code="refused")
        last = [t.finish(c) for t, c in zip(tellers, self.completions, strict=True)]
        sampled = sum(len(c.token_ids) for c in self.completions)
        self.usage = usage(asked.prompt_tokens, sampled)
        desk.metrics.tokens(asked.prompt_tokens, sampled)
        for choice, piece in enumerate(last):
            yield choice, piece


class StrategyAnswer(AnswerContext):
    """Answer with the result of a strategy, as one choice in one piece."""

    async def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        desk, asked = self._desk, self.asked
        assert asked.strategy is not None
        with desk.api_errors("forge.options"):
            async with asyncio.timeout_at(self._deadline):
                result = await desk.strategies.run(asked, self._prefix)
        spent = result.spent
        told = StrategyInfo(
            name=asked.strategy.name, options=dict(asked.strategy.options), answer=result.answer,
            tokens=spent.tokens, prompt_tokens=spent.prompt_tokens, calls=spent.calls,
            asks=spent.asks, seconds=round(spent.seconds, 6), details=dict(result.details),
        )  # fmt: skip
        self.forge = self.forge.model_copy(update={"strategy": told})
        # Count all tokens that the strategy's calls read and sampled, not only the answer's.
        self.usage = usage(spent.prompt_tokens, spent.tokens)
        desk.metrics.tokens(spent.prompt_tokens, spent.tokens)
        cut = result.finish_reason in ("length", "budget")
        yield 0, TextPiece(result.text, (), "length" if cut else "stop")
