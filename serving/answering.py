"""One request being answered: let in, its cartridge held, its responses told as they come.

    begin   room -> cartridge in the generators -> Answering
    pieces  tokens come -> (choice, piece), ...; at the end `usage`, `forge`, `completions`
    close   room given back; what still decodes is ended

The deadline counts from `begin`. Whoever began closes, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack
from typing import Protocol

from environments.conversation import NO_DOCUMENT
from protocols.errors import DataError, ForgeError, RunError
from protocols.types import Came, Completion, PrefixRef, composed_ref
from serving.admission import Admission
from serving.asked import Asked, requests_of
from serving.backend import Backend
from serving.errors import ApiError
from serving.metrics import ServingMetrics
from serving.shelf import Shelf
from serving.strategy_port import Strategies
from serving.telling import Piece, Teller
from serving.texts import Texts
from serving.wire_common import CartridgeTold, ForgeTold, StrategyTold, Usage, usage

BARE = PrefixRef(f"document/{NO_DOCUMENT}", 0)


class Answering(Protocol):
    """What the wire tells of a request."""

    asked: Asked
    created: int
    usage: Usage
    forge: ForgeTold
    completions: Sequence[Completion]

    def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]: ...

    async def close(self) -> None: ...


class Desk:
    """What answers requests: the generators, the cartridges that they hold, the room there is."""

    def __init__(
        self,
        backend: Backend,
        texts: Texts,
        shelf: Shelf,
        admission: Admission,
        metrics: ServingMetrics,
        strategies: Strategies,
        end_ids: frozenset[int],
        deadline_s: float,
    ) -> None:
        self.backend, self.texts, self.shelf, self.admission = backend, texts, shelf, admission
        self.metrics, self.strategies = metrics, strategies
        self.end_ids, self.deadline_s = end_ids, deadline_s

    async def begin(self, asked: Asked) -> Answering:
        """Raises ApiError: no room, a cartridge that cannot be had, no time."""
        deadline = time.monotonic() + self.deadline_s
        if asked.strategy is not None:
            with as_api_errors("forge.options"):
                self.strategies.check(asked.strategy)
        held = AsyncExitStack()
        try:
            held.enter_context(self.admission.let_in(asked.responses))
            parts = []
            for entry in asked.entries:
                using = held.enter_async_context(self.shelf.using(entry))
                with as_api_errors():
                    left = max(0.0, deadline - time.monotonic())
                    parts.append(await asyncio.wait_for(using, left))
            prefix = composed_ref(parts) if parts else BARE
        except BaseException:
            await held.aclose()
            raise
        kind = Plain if asked.strategy is None else Thought
        return kind(self, asked, prefix, held, deadline)


class _Answer:
    """What both kinds share."""

    def __init__(
        self, desk: Desk, asked: Asked, prefix: PrefixRef, held: AsyncExitStack, deadline: float
    ) -> None:
        self.asked, self.created = asked, int(time.time())
        self.usage = usage(asked.prompt_tokens, 0)
        self.completions: Sequence[Completion] = ()
        self.forge = ForgeTold(seed=asked.seed, cartridge_tokens=asked.cartridge_tokens)
        told = [
            CartridgeTold(name=name, version=version, tokens=entry.manifest.tokens)
            for entry in asked.entries
            for name, version in [entry.key]
        ]
        if len(told) == 1:
            self.forge = self.forge.model_copy(update={"cartridge": told[0]})
        elif told:
            self.forge = self.forge.model_copy(update={"cartridges": told})
        self._desk, self._prefix, self._held, self._deadline = desk, prefix, held, deadline

    async def close(self) -> None:
        await self._held.aclose()

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _late(self) -> ApiError:
        return ApiError(
            504,
            f"no whole answer within {self._desk.deadline_s:g} s; ask for fewer tokens, or raise "
            "http.deadline_s where the server is configured",
            code="deadline_exceeded",
        )


class Plain(_Answer):
    """Responses straight from the generators."""

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(choice, piece) as they come; a choice's last has a finish_reason. Raises ApiError."""
        desk, asked = self._desk, self.asked
        requests = requests_of(asked, self._prefix)
        index = {r.id: i for i, r in enumerate(requests)}
        tellers = [Teller(desk.texts.decode, asked.stops, desk.end_ids) for _ in requests]
        queue: asyncio.Queue[Came | None] = asyncio.Queue()
        begun, first = time.monotonic(), True
        told = queue.put_nowait if asked.stream else None
        work = asyncio.create_task(desk.backend.generate(requests, told))
        work.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while True:
                try:
                    came = await asyncio.wait_for(queue.get(), self._left())
                except TimeoutError as error:
                    raise self._late() from error
                if came is None:
                    break
                if first:
                    desk.metrics.first_token(time.monotonic() - begun)
                    first = False
                choice = index[came.request_id]
                piece = tellers[choice].feed(came)
                if piece.text or piece.tokens:
                    yield choice, piece
            with as_api_errors():
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
        finally:
            await end(work)


class Thought(_Answer):
    """One response that a strategy came to."""

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """The one piece, at the end. Raises ApiError."""
        desk, asked = self._desk, self.asked
        assert asked.strategy is not None
        work = asyncio.create_task(desk.strategies.run(asked, self._prefix))
        try:
            await asyncio.wait({work}, timeout=self._left())
            if not work.done():
                raise self._late()
            with as_api_errors("forge.options"):
                result = work.result()
        finally:
            await end(work)
        spent = result.spent
        told = StrategyTold(
            name=asked.strategy.name, options=dict(asked.strategy.options), answer=result.answer,
            tokens=spent.tokens, prompt_tokens=spent.prompt_tokens, calls=spent.calls,
            asks=spent.asks, seconds=round(spent.seconds, 6), details=dict(result.details),
        )  # fmt: skip
        self.forge = self.forge.model_copy(update={"strategy": told})
        # What was read and sampled in all: that is what the answer took.
        self.usage = usage(spent.prompt_tokens, spent.tokens)
        desk.metrics.tokens(spent.prompt_tokens, spent.tokens)
        cut = result.finish_reason in ("length", "budget")
        yield 0, Piece(result.text, (), "length" if cut else "stop")


async def end(work: asyncio.Task[object]) -> None:
    """Cancel it, and wait until it has ended; its outcome was taken, or nobody wants it."""
    work.cancel()
    with contextlib.suppress(Exception, asyncio.CancelledError):
        await work


@contextlib.contextmanager
def as_api_errors(param: str | None = None) -> Iterator[None]:
    """Errors of the house as clients are told them."""
    try:
        yield
    except DataError as error:
        raise ApiError(400, str(error), param=param) from error
    except RunError as error:
        raise ApiError(503, str(error), code="generators_unavailable") from error
    except ForgeError as error:
        raise ApiError(503, str(error), code="cartridge_unavailable") from error
    except TimeoutError as error:
        raise ApiError(504, "the deadline passed", code="deadline_exceeded") from error
