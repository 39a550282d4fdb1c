"""Answer one request: admit it, hold its cartridges, and yield its responses piece by piece.

    begin   key's requests -> parsing, routing -> admission by cost -> key's tokens -> audit log
            -> cartridges loaded in the generators -> AnswerContext
    pieces  (choice, piece), ... as tokens are sampled; then `usage`, `forge`, `completions` are set
    close   cancel what still decodes, then release the cartridges and the admission

The deadline counts from the end of parsing. The caller of `begin` must call `close`, also after an
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import astuple, replace
from functools import partial
from typing import Any, TypeVar

from starlette.types import Scope

from cartridge_forge.plugins.chat.wire.anthropic_messages import MessagesRequest
from cartridge_forge.plugins.chat.wire.detokenizer import Detokenizer, TextPiece
from cartridge_forge.plugins.chat.wire.errors import ApiError, refusing
from cartridge_forge.plugins.chat.wire.openai_chat import (
    CartridgeInfo,
    ChoicePassages,
    ForgeExtension,
    RoutedInfo,
    StrategyInfo,
    SupportingText,
    usage,
)
from cartridge_forge.plugins.decoding.grammar import Grammars
from cartridge_forge.plugins.documents.study.support import supporting_passages
from cartridge_forge.plugins.serve.access.admission import Admission, RequestCost, TokenReservation
from cartridge_forge.plugins.serve.access.audit import AuditLog
from cartridge_forge.plugins.serve.access.fairness import FairTurns
from cartridge_forge.plugins.serve.access.keys import CALLER, Caller, peer_of
from cartridge_forge.plugins.serve.apis.hub import HubCartridges
from cartridge_forge.plugins.serve.apis.tokasaurus import CartridgeFields
from cartridge_forge.plugins.serve.backend import ServerConfig
from cartridge_forge.plugins.serve.engine.resident_cartridges import ResidentCartridges
from cartridge_forge.plugins.serve.engine.verification import (
    VERIFY_HEADER,
    AnswerVerifier,
    VerifyPlan,
    header_of,
    scoring_request,
    stored_text,
)
from cartridge_forge.plugins.serve.metrics import ServingMetrics
from cartridge_forge.plugins.serve.middleware import end
from cartridge_forge.plugins.serve.request import ServingRequest, StrategyRequest, requests_of
from cartridge_forge.plugins.serve.request_parsing import RequestParser, RouteNeeded
from cartridge_forge.plugins.serve.responses import unsaid
from cartridge_forge.plugins.serve.routing import WordIndex
from cartridge_forge.plugins.serve.structured.call_reading import (
    CalledTools,
    CallReader,
    with_calls,
)
from cartridge_forge.protocols.errors import DataError, EngineKilledError, ForgeError, RunError
from cartridge_forge.protocols.ports import TokenChunk
from cartridge_forge.protocols.step import (
    NO_DOCUMENT,
    Completion,
    GenerateRequest,
    PrefixRef,
    composed_ref,
)

Body = TypeVar("Body")
Parsed = TypeVar("Parsed")
Parse = Callable[[RequestParser, Body], ServingRequest]
RETRY_SECONDS = 5  # a lost generator is replaced in about as many
CARTRIDGE_HEADER = "x-forge-cartridge"
UNCOUNTED = 10**15  # more is refused anyway; a number of thousands of digits could not be told
BARE = PrefixRef(f"document/{NO_DOCUMENT}", 0)
NOTHING = PrefixRef("document/", 0)


class RequestHandler:
    """Begin requests, with the parser, the generators' cartridges and the admission limit of one
    server. Call `close` after the last request."""

    def __init__(self, config: ServerConfig) -> None:
        self.config, http = config, config.http
        self._parsers: dict[str, RequestParser] = {}
        self._grammars = Grammars(lambda: config.texts.tokenizer, config.end_ids)
        self.admission = Admission(http.max_pending, http.max_pending_tokens)
        self.turns = FairTurns(config.backend.healthy)
        self.audit = AuditLog(http.audit, http.audit_text)
        self.metrics = ServingMetrics(
            lambda: self.admission.pending, config.backend.depth, config.backend.healthy
        )
        self.cartridges = ResidentCartridges(config.backend, config.held_cartridges)
        self.hub = HubCartridges(config.hub, config.hub_token, config.library)
        self.verifier = AnswerVerifier(config)
        # One thread: a tokenizer is not thread-safe, and its work must not hold the event loop up.
        self.parsing = ThreadPoolExecutor(1, "parsing")
        # The index of words is read here, so that requests for no router do not wait for it.
        self.index = WordIndex(config.library)
        self.routing, self.scanning = (
            ThreadPoolExecutor(1, "routing"),
            ThreadPoolExecutor(1, "scan"),
        )

    async def close(self) -> None:
        await self.cartridges.close()
        for executor in (self.parsing, self.routing, self.scanning):
            executor.shutdown(wait=False, cancel_futures=True)
        self.hub.close()
        self.audit.close()

    def parser(self, caller: Caller) -> RequestParser:
        """Return the parser for the cartridges that the caller may use."""
        if caller.name not in self._parsers:
            self._parsers[caller.name] = RequestParser(
                self.config, caller, self._grammars, self.index
            )
        return self._parsers[caller.name]

    async def parse(
        self, caller: Caller, body: Body, parse: Callable[[RequestParser, Body], Parsed]
    ) -> Parsed:
        """Return what a method of the caller's parser makes of a request. A model that the router
        chooses is chosen on a thread of its own, between a parse that ends there and another.
        Raises ApiError."""
        loop, parser = asyncio.get_running_loop(), self.parser(caller)
        try:
            return await loop.run_in_executor(self.parsing, parse, parser, body)
        except RouteNeeded as needed:
            route = await loop.run_in_executor(self.routing, parser.route, needed.question)
        if self.index.is_due:
            self.scanning.submit(self.index.rescan)
        return await loop.run_in_executor(self.parsing, parse, parser.routed_to(route), body)

    async def begin(self, scope: Scope, body: Body, parse: Parse[Body]) -> AnswerContext:
        """Return the context of an admitted request, with its cartridges loaded. Raises ApiError
        for a malformed request, a cartridge that the key is not for or that cannot be loaded, a
        full queue, a spent quota, or a deadline that passed."""
        loop, caller = asyncio.get_running_loop(), scope[CALLER]
        async with AsyncExitStack() as stack:
            stack.enter_context(caller.quota.let_in())
            if isinstance(body, CartridgeFields):
                noted = partial(self._note_pull, caller, scope)
                await self.hub.fetch(body.cartridges or (), caller, noted)
            request = await self.parse(caller, body, parse)
            deadline = loop.time() + self.config.http.deadline_s
            cost = self._cost(request)
            stack.enter_context(self.admission.let_in(cost, caller.name))
            reserved = stack.enter_context(caller.quota.reserve(cost))
            self._write_down(request, caller, scope)
            with self.api_errors():
                async with asyncio.timeout_at(deadline):
                    using = [self.cartridges.using(entry) for entry in request.entries]
                    parts = [await stack.enter_async_context(part) for part in using]
            if request.routed is not None:
                self.metrics.routed(request.routed.entry.manifest.name)
            prefix = composed_ref(parts) if parts else NOTHING if request.echo else BARE
            plan = None
            if request.verify is not None:
                with refusing(400, "forge.verify", "document_unknown"):
                    async with asyncio.timeout_at(deadline):
                        plan = await loop.run_in_executor(
                            self.parsing, self.verifier.plan, request, prefix,
                            self.admission.pending,
                        )  # fmt: skip
            document = ""
            if request.supported is not None:
                with refusing(400, "forge.passages", "document_unknown"):
                    document = await loop.run_in_executor(
                        self.parsing, stored_text, request.entries[0]
                    )
            answering = AnswerContext(
                self, request, prefix, stack.pop_all(), deadline, reserved,
                partial(self.turn, caller.name, cost), plan, document,
            )  # fmt: skip
        if request.strategy is None:
            answering.sample()
        return answering

    async def count(self, scope: Scope, body: MessagesRequest) -> int:
        """Return the prompt tokens of messages. Raises ApiError as `begin` does for their
        fields."""
        caller = scope[CALLER]
        with caller.quota.let_in():
            return await self.parse(caller, body, RequestParser.message_tokens)

    def turn(self, key: str, cost: RequestCost) -> AbstractAsyncContextManager[None]:
        """Return what lets a request of the key start in its turn; of one key, at once."""
        several = len(self.config.api_keys) > 1
        return self.turns.turn(key, cost) if several else contextlib.nullcontext()

    def _cost(self, request: ServingRequest) -> RequestCost:
        """Return the bound of what a request decodes, from its fields alone."""
        most, strategy = request.sampling.max_tokens, request.strategy
        if strategy is None:
            read = request.n * request.prompt_tokens
            once = RequestCost(request.responses, read + request.responses * most)
            # A verified request is read twice: over the cartridge, and over the document.
            return once if request.verify is None else replace(once, tokens=2 * once.tokens)
        with self.api_errors("forge.options"):
            cost = self.config.strategies.cost(strategy)
        sequences, responses, again, words = (min(n, UNCOUNTED) for n in astuple(cost))
        sampled = responses * most
        if strategy.budget is not None:
            # A strategy may make room for every response before the budget ends it.
            sampled = max(min(sampled, strategy.budget), responses)
            most = min(most, strategy.budget)
        read = responses * (request.prompt_tokens + words + again * most)
        return RequestCost(sequences, read + sampled, "forge.options")

    def _write_down(self, request: ServingRequest, caller: Caller, scope: Scope) -> None:
        used = [f"{name}@{version}" for name, version in (e.key for e in request.entries)]
        facts: dict[str, Any] = {}
        if self.audit.with_text:
            read = self.config.texts.decode
            facts["text"] = [[m.role, m.content] for m in request.messages] or [
                read(prompt.ids) for prompt in request.prompts
            ]
        self.audit.write(
            "asked", caller.name, peer_of(scope), request=request.id, cartridges=used,
            strategy=request.strategy and request.strategy.name,
            prompt_tokens=request.prompt_tokens, **facts,
        )  # fmt: skip

    def _note_pull(self, caller: Caller, scope: Scope, name: str, repository: str) -> None:
        facts: dict[str, Any] = {"action": "pull", "cartridges": [name], "hub": repository}
        self.audit.write("changed", caller.name, peer_of(scope), **facts)

    @contextlib.contextmanager
    def api_errors(self, param: str | None = None) -> Iterator[None]:
        """Raise errors of the block as ApiError."""
        try:
            yield
        except DataError as error:
            raise ApiError(400, str(error), param=param) from error
        except EngineKilledError as error:
            raise ApiError(500, str(error), code="engine_died", retry=False) from error
        except RunError as error:
            raise ApiError(
                503, str(error), code="generators_unavailable", retry_after=RETRY_SECONDS
            ) from error
        except ForgeError as error:
            raise ApiError(503, str(error), code="cartridge_unavailable") from error
        except TimeoutError as error:
            if not self.config.backend.healthy():
                raise ApiError(
                    503,
                    f"no generator was in service within {self.config.http.deadline_s:g} s; send "
                    "the request again",
                    code="generators_unavailable",
                    retry_after=RETRY_SECONDS,
                ) from error
            late = (
                f"no whole answer within {self.config.http.deadline_s:g} s; ask for fewer tokens, "
                "or raise http.deadline_s where the server is configured"
            )
            raise ApiError(504, late, code="deadline_exceeded") from error


class AnswerContext:
    """Hold the state of a request that is being answered; `close` closes `stack`, and with it ends
    what `sample` began."""

    def __init__(
        self,
        handler: RequestHandler,
        request: ServingRequest,
        prefix: PrefixRef,
        stack: AsyncExitStack,
        deadline: float,
        reserved: TokenReservation,
        turn: Callable[[], AbstractAsyncContextManager[None]],
        plan: VerifyPlan | None = None,
        document: str = "",
    ) -> None:
        self.request, self.created, self._plan = request, int(time.time()), plan
        self._document = document  # whose passages support the responses
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
        self._handler, self._prefix, self._held, self._deadline = handler, prefix, stack, deadline
        # What is cut off has used all that it reserved: nobody counted its tokens.
        self._reserved, reserved.used = reserved, reserved.tokens
        self._tokens: asyncio.Queue[TokenChunk | None] = asyncio.Queue()  # None: there are no more
        self._calls: Sequence[GenerateRequest] = ()
        self._work: asyncio.Task[list[Completion]] | None = None
        self._turn = turn
        self._begun = 0.0  # of `time.monotonic`

    async def close(self) -> None:
        await self._held.aclose()

    @property
    def headers(self) -> dict[str, str]:
        """Return the header that names the cartridges before the prompt, {} for none, and the one
        that tells how their document verified the reply: all of it once the reply is whole."""
        used = [f"{name}@{version}" for name, version in (e.key for e in self.request.entries)]
        named = {CARTRIDGE_HEADER: ",".join(used)} if used else {}
        if self._plan is not None:
            named[VERIFY_HEADER] = header_of(self._plan, self.forge.verify)
        return named

    def sample(self) -> None:
        """Ask the generators for the responses, before the reply begins."""
        request, on_tokens = self.request, self._tokens.put_nowait
        self._begun = time.monotonic()
        plan = self._plan
        if plan is None or plan.mode == "after":
            self._calls = requests_of(request, self._prefix)
        else:
            document = plan.document
            self._calls = requests_of(request, document.ref, document.ids, plan.draft)
        backend = self._handler.config.backend
        calls, told = self._calls, on_tokens if request.stream else None

        async def generated() -> list[Completion]:
            async with self._turn():
                return await backend.generate(calls, told)

        self._work = asyncio.create_task(generated())
        self._held.push_async_callback(end, self._work)
        self._work.add_done_callback(lambda _: on_tokens(None))

    def pieces(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield (choice, piece) as tokens are sampled; the last piece of a choice has a
        finish_reason. Raises ApiError."""
        strategy = self.request.strategy
        return self._sampled() if strategy is None else self._by_strategy(strategy)

    async def _sampled(self) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield the responses of `sample`."""
        handler, config, request = self._handler, self._handler.config, self.request
        calls, work = self._calls, self._work
        assert work is not None
        index = {call.id: i for i, call in enumerate(calls)}
        decode = config.texts.decode_calls if request.tools else config.texts.decode
        ends = config.end_ids, request.stop_ids
        texts = [Detokenizer(decode, request.stops, *ends) for _ in calls]
        called = self._call_readers()
        first = True
        while True:
            with handler.api_errors():
                async with asyncio.timeout_at(self._deadline):
                    chunk = await self._tokens.get()
            if chunk is None:
                break
            if first:
                handler.metrics.first_token(time.monotonic() - self._begun)
                first = False
            choice = index[chunk.request_id]
            piece = texts[choice].feed(chunk)
            if called:
                piece = with_calls(called[choice], piece)
            if piece.text or piece.tokens or piece.calls:
                yield choice, piece
        with handler.api_errors():
            self.completions = work.result()
        if first and request.stream:  # one token, which comes with its completion
            handler.metrics.first_token(time.monotonic() - self._begun)
        for completion in self.completions:
            if completion.finish_reason in ("error", "cancelled"):
                why = completion.error or "the generators ended it"
                raise ApiError(503, f"a response could not be sampled: {why}", code="refused")
            if completion.finish_reason == "grammar":
                raise ApiError(
                    400,
                    f"what the response must match cannot be followed: {completion.ended_by}; ask "
                    "for something simpler",
                    param="tools" if request.tools else "response_format",
                    code="grammar_too_costly",
                )
        if request.sampling.max_tokens == 0:
            self.completions = [unsaid(c) for c in self.completions]
        self._count(request.prompt_tokens, sum(len(c.token_ids) for c in self.completions))
        ended = zip(texts, self.completions, strict=True)
        if self._plan is not None:
            last = []
            for choice, (text, completion) in enumerate(ended):
                # Their text is told before the document's word on it.
                piece = text.rest_of(completion)
                if piece.text or piece.tokens:
                    yield choice, with_calls(called[choice], piece) if called else piece
            await self._verify(self._plan)
            ended = zip(texts, self.completions, strict=True)
        if request.supported is not None:
            self._support(request.supported)
        last = [text.finish(c) for text, c in ended]
        for choice, piece in enumerate(last):
            yield choice, with_calls(called[choice], piece) if called else piece
        handler.metrics.called(sum(reader.whole for reader in called))

    async def _verify(self, plan: VerifyPlan) -> None:
        """Set `forge.verify`: of the document's own answer its draft, of a cartridge's the
        document's word on it."""
        handler, scored = self._handler, list[Completion]()
        if plan.mode == "after":
            calls = [
                scoring_request(call, completion.token_ids, plan.document)
                for call, completion in zip(self._calls, self.completions, strict=True)
                if completion.token_ids
            ]
            with handler.api_errors():
                async with asyncio.timeout_at(self._deadline):
                    scored = await handler.config.backend.generate(calls) if calls else []
            for completion in scored:
                if completion.finish_reason in ("error", "cancelled"):
                    why = completion.error or "the generators ended it"
                    raise ApiError(503, f"an answer could not be verified: {why}", code="refused")
        info = handler.verifier.info(plan, self.completions, scored)
        self.forge = self.forge.model_copy(update={"verify": info})
        handler.metrics.verified(info)

    def _support(self, question: str) -> None:
        """Set `forge.passages`: of each response those passages of the document that support it."""
        decode = self._handler.config.texts.decode
        choices = [
            ChoicePassages(
                index=index,
                passages=[
                    SupportingText(**vars(one))
                    for one in supporting_passages(
                        self._document, question, decode(completion.token_ids)
                    )
                ],
            )
            for index, completion in enumerate(self.completions)
        ]
        self.forge = self.forge.model_copy(update={"passages": choices})

    def _call_readers(self) -> list[CallReader]:
        """Return a reader of calls for each response, none where no tools are offered."""
        request, offer = self.request, self.request.tools
        if offer is None:
            return []
        names = frozenset(tool.name for tool in offer.tools)
        serial = re.split("[-_]", request.id)[-1]

        def reader(choice: int) -> CallReader:
            new_id = f"call_{serial}_{choice}_{{}}".format
            return offer.form.read(CalledTools(names, offer.most, new_id))

        return [reader(choice) for choice in range(request.responses)]

    async def _by_strategy(
        self, strategy: StrategyRequest
    ) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Yield the result of a strategy, as one choice in one piece."""
        with self._handler.api_errors("forge.options"):
            async with asyncio.timeout_at(self._deadline), self._turn():
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
        self._reserved.used = read + sampled
        self._handler.metrics.tokens(read, sampled)
