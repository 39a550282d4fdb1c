"""Step an engine in a thread of its own, so that its actor stays responsive. Imports no vLLM.

    submit, hold, ...  ->  inbox, in order  ->  the thread: calls that are due, then one step, ...
                                                finished requests -> their futures
                                                tokens of streams -> their callbacks, once a step

With `finish`, a version that is published while requests are in flight joins between two steps, and
the requests end on the version they started with. With `drain`, it and all later calls wait until
the requests have ended. An engine that raises in a step is dead: all pending and later calls get
its error, so that its replica is replaced, and `on_death` is called in the engine's thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from cartridge_forge.learning.cartridge import CartridgeId, VersionLedger
from cartridge_forge.plugins.decoding.engine import PassError
from cartridge_forge.protocols.errors import EngineDied, ForgeError, PublishError
from cartridge_forge.protocols.ports import EngineReport, TokenChunk, refused
from cartridge_forge.protocols.step import Completion, GenerateRequest, PrefixRef

log = logging.getLogger("forge.engine")
Told = Callable[[Sequence[TokenChunk]], None]  # with what a step added to requests


class Engine(Protocol):
    """Decode requests step by step. One thread builds the engine and calls all its methods."""

    first_token_seconds: float | None

    def add(
        self, key: str, request: GenerateRequest, prefix: PrefixRef, stream: bool = False
    ) -> None:
        """Add a request. `prefix` is its prefix, of which each cartridge's version is the one that
        it is held under, as is that of its draft. Raises DataError for a malformed request."""
        ...

    def step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        """Run one forward pass; return the requests that it ended and new tokens of streams. An
        error is the end of the engine; PassError says which requests may be its cause."""
        ...

    def cancel(self, key: str) -> None:
        """End a request early: a later step returns it as "cancelled"."""
        ...

    def hold(self, cartridges: Mapping[CartridgeId, Tensor]) -> None:
        """Keep cartridges [L, 2, H_kv, P, D]. Raises PublishError, and keeps none, when one does
        not fit the model."""
        ...

    def let_go(self, cartridges: Sequence[CartridgeId]) -> None: ...

    def loads(self) -> tuple[int, int]:
        """Return the number of loads so far, and of the tokens they wrote."""
        ...

    def close(self) -> None: ...


@dataclass
class EngineCall:
    """Hold work for the engine's thread. It resolves the future, at once or at a later step."""

    work: Callable[[Future[Any]], None]
    future: Future[Any]
    when_idle: bool = False


@dataclass
class RequestInFlight:
    future: Future[Completion]
    prefixes: tuple[PrefixRef, ...]  # as the engine has them, kept until the request ends
    id: str
    told: Told | None


class EngineThread:
    """Build an engine in a new thread and step it there until it is closed or dies."""

    def __init__(
        self,
        build: Callable[[], Engine],
        keep: int,
        in_flight: Literal["finish", "drain"],
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self.started: Future[None] = _promise()
        self._drain, self._on_death = in_flight == "drain", on_death
        self._ledger = VersionLedger(keep)
        self._inbox: deque[EngineCall] = deque()
        self._running: dict[str, RequestInFlight] = {}
        self._changed = threading.Condition()  # guards the inbox, _dead and _closing
        self._dead: EngineDied | None = None
        self._suspects: Collection[str] = ()  # the requests that the step which failed was over
        self._closing: Future[EngineReport] | None = None
        self._keys = map(str, itertools.count())
        # A daemon: a process that must exit does not wait for an engine that hangs.
        threading.Thread(target=self._live, args=(build,), daemon=True).start()

    # -- from any thread ------------------------------------------------------------------------

    def submit(self, request: GenerateRequest, on_tokens: Told | None = None) -> Future[Completion]:
        """Return a future of the completion, with `finish_reason` "error" when its prefix is not
        held. `on_tokens` is called after each step with the tokens that it added to requests of the
        same callback, but for a request's last ones, which its completion has. It runs in the
        engine's thread: it must not block.

        Like every future here it raises EngineDied when the engine dies first.
        """
        return self._post(
            EngineCall(lambda future: self._begin(request, future, on_tokens), _promise())
        )

    def cancel(self, ids: Collection[str]) -> Future[None]:
        """End the requests of these ids that are here; their `finish_reason` is "cancelled"."""

        def work(future: Future[None]) -> None:
            for key, running in self._running.items():
                if running.id in ids:
                    self._engine.cancel(key)
            future.set_result(None)

        return self._post(EngineCall(work, _promise()))

    def missing(self, since: Mapping[str, int]) -> Future[set[str]]:
        """Return a future of the names whose numbers, of the versions `since`, are not held."""
        return self._post(
            EngineCall(lambda future: future.set_result(self._ledger.missing(since)), _promise())
        )

    def hold(
        self, version: int, since: Mapping[str, int], new: Mapping[str, Tensor]
    ) -> Future[int]:
        """Return a future of the version, resolved when requests may name it. `new` are its
        cartridges [L, 2, H_kv, P, D] that are not held. The future raises PublishError for a
        version that was used before."""

        def work(future: Future[int]) -> None:
            self._ledger.check(version, since, new.keys())
            if new:
                self._engine.hold({(name, since[name]): kv for name, kv in new.items()})
            self._let_go(self._ledger.add(version, since, new.keys()))
            future.set_result(version)

        return self._post(EngineCall(work, _promise(), when_idle=self._drain))

    def drop(self, version: int) -> Future[None]:
        """Stop serving a version after its requests in flight have ended. The future raises
        PublishError for one that is not held."""

        def work(future: Future[None]) -> None:
            self._let_go(self._ledger.drop(version))
            future.set_result(None)

        return self._post(EngineCall(work, _promise()))

    def report(self) -> Future[EngineReport]:
        return self._post(EngineCall(lambda future: future.set_result(self._report()), _promise()))

    def close(self) -> Future[EngineReport]:
        """Stop and fail all requests in flight; return a future of the last report."""
        with self._changed:
            if self._closing is None:
                self._closing = _promise()
                if self._dead is not None:
                    self._closing.set_exception(self._dead)
            self._changed.notify()
            return self._closing

    def _post(self, job: EngineCall) -> Future[Any]:
        with self._changed:
            if self._dead is None:
                self._inbox.append(job)
                self._changed.notify()
            else:
                job.future.set_exception(self._dead)
        return job.future

    # -- in the engine's thread -----------------------------------------------------------------

    def _live(self, build: Callable[[], Engine]) -> None:
        start = time.perf_counter()
        try:
            self._engine = build()
        except BaseException as error:
            self._fail_all(EngineDied.of(error))
            self.started.set_exception(error)
            return
        self._start_seconds = time.perf_counter() - start
        self.started.set_result(None)
        try:
            while self._closing is None:
                self._work_off()
                if self._running:
                    self._step()
        except BaseException as error:
            try:
                self._die(error)
            finally:  # without memory anything may fail
                self._on_death()
            return
        self._stop(self._closing)

    def _die(self, error: BaseException) -> None:
        died = EngineDied.of(error)
        self._fail_all(died)
        if self._closing is not None and not self._closing.done():
            self._closing.set_exception(died)
        with contextlib.suppress(Exception):  # the engine is dead already
            self._engine.close()
        log.error("the engine died", exc_info=error)

    def _step(self) -> None:
        news_of: dict[str, TokenChunk] = {}
        ended: dict[str, Completion] = {}
        try:
            stepped = [*self._engine.step()]
        except PassError as error:
            self._suspects = error.keys
            raise error.__cause__ or error from None
        except BaseException:
            self._suspects = self._running.keys()
            raise
        for key, news in stepped:
            if isinstance(news, Completion):
                ended[key] = news
            else:
                news_of[key] = news
        added: dict[Told, list[TokenChunk]] = {}
        for key, chunk in news_of.items():
            if key not in ended and (on_tokens := self._running[key].told):
                added.setdefault(on_tokens, []).append(chunk)
        for on_tokens, chunks in added.items():
            on_tokens(chunks)
        for key, completion in ended.items():
            self._end(key, completion)

    def _work_off(self) -> None:
        """Run the calls that are due; with nothing in flight, wait for one."""
        while self._closing is None:
            with self._changed:
                while not (self._inbox or self._running or self._closing):
                    self._changed.wait()
                if not self._inbox or (self._inbox[0].when_idle and self._running):
                    return
                job = self._inbox.popleft()
            try:
                job.work(job.future)
            except ForgeError as error:  # the caller's mistake; the engine is well
                job.future.set_exception(error)
            except BaseException as error:
                job.future.set_exception(EngineDied.of(error))
                raise

    def _begin(
        self,
        request: GenerateRequest,
        future: Future[Completion],
        on_tokens: Told | None,
    ) -> None:
        try:
            prefix = self._ledger.resolved(request.prefix)
            prefixes = [prefix]
            if (draft := request.draft) is not None:
                prefixes.append(self._ledger.resolved(draft.prefix))
                request = dataclasses.replace(
                    request, draft=dataclasses.replace(draft, prefix=prefixes[1])
                )
        except PublishError as error:
            future.set_result(refused(request, str(error)))
            return
        key = next(self._keys)
        self._engine.add(key, request, prefix, stream=on_tokens is not None)
        self._running[key] = RequestInFlight(future, tuple(prefixes), request.id, on_tokens)
        for one in prefixes:
            self._ledger.begin(one)

    def _end(self, key: str, completion: Completion) -> None:
        ended = self._running.pop(key)
        for prefix in ended.prefixes:
            self._let_go(self._ledger.end(prefix))
        ended.future.set_result(completion)

    def _let_go(self, cartridges: Sequence[CartridgeId]) -> None:
        if cartridges:
            self._engine.let_go(cartridges)

    def _report(self) -> EngineReport:
        loads, tokens = self._engine.loads()
        return EngineReport(self._start_seconds, self._engine.first_token_seconds, loads, tokens)

    def _stop(self, closing: Future[EngineReport]) -> None:
        try:
            report = self._report()
            start = time.perf_counter()
            self._engine.close()
            seconds = time.perf_counter() - start
        except BaseException as error:
            self._fail_all(EngineDied.of(error))
            closing.set_exception(error)
            return
        self._fail_all(EngineDied("the engine serves no more: it was shut down", suspect=False))
        closing.set_result(dataclasses.replace(report, stop_seconds=seconds))

    def _fail_all(self, error: EngineDied) -> None:
        """Fail all pending and later calls with this error; those that are not `_suspects` are told
        so."""
        failure = EngineDied(str(error), suspect=False)
        with self._changed:
            self._dead = failure
            jobs, self._inbox = self._inbox, deque()
        for job in jobs:
            job.future.set_exception(failure)
        for key, running in self._running.items():
            running.future.set_exception(error if key in self._suspects else failure)
        self._running = {}


def _promise() -> Future[Any]:
    """Return a future that cannot be cancelled: a caller that gives up does not stop the engine."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
