"""An engine that steps in a thread of its own, so that its actor goes on answering. No vLLM.

    submit, hold, ask  ->  inbox, in order  ->  the thread: jobs that are due, then one step, ...
                                                finished requests -> their futures
                                                tokens of streams -> whoever was named for them

What is published while requests are in flight either joins between two steps (`finish`: they end
on the version they started with) or waits, and everything behind it, until they have (`drain`).
An engine that raises is dead: everything that waits for it, and every later call, gets the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from learning.cartridge.versions import VersionLedger
from protocols.errors import ForgeError, PublishError
from protocols.types import Completion, EngineReport, GenerateRequest, TokenChunk, refused

CARTRIDGE = "cartridge/"


class Engine(Protocol):
    """What is stepped. Every method is called by the one thread that also built it."""

    first_token_seconds: float | None

    def add(self, key: str, request: GenerateRequest, stream: bool = False) -> None:
        """Take a request whose prefix is held. Raises DataError for a malformed one."""
        ...

    def step(self) -> Iterable[tuple[str, TokenChunk | Completion]]:
        """One forward pass: the requests that ended with it, and what came of streams."""
        ...

    def cancel(self, key: str) -> None:
        """End a request that is not wanted any more: it ends, "cancelled", with a later step."""
        ...

    def hold(self, version: int, names: tuple[str, ...], kv: Tensor) -> None:
        """Keep [C, L, 2, H_kv, P, D]. Raises PublishError when they do not fit the model."""
        ...

    def let_go(self, version: int) -> None: ...

    def loads(self) -> tuple[int, int]:
        """Loads so far, and the tokens they wrote."""
        ...

    def close(self) -> None: ...


class EngineDied(RuntimeError):
    """The engine failed and serves nothing any more; its replica must be replaced."""


@dataclass
class EngineCall:
    """Work for the engine's thread. It resolves the future, now or when its request has ended."""

    work: Callable[[Future[Any]], None]
    future: Future[Any]
    when_idle: bool = False


@dataclass
class RequestInFlight:
    future: Future[Completion]
    versions: tuple[int, ...]  # of the cartridges, to be kept meanwhile
    id: str
    told: Callable[[TokenChunk], None] | None


class EngineThread:
    """Builds an engine in a new thread and steps it there until it is closed or dies."""

    def __init__(
        self, build: Callable[[], Engine], keep: int, in_flight: Literal["finish", "drain"]
    ) -> None:
        self.started: Future[None] = _promise()
        self._drain = in_flight == "drain"
        self._ledger = VersionLedger(keep)
        self._inbox: deque[EngineCall] = deque()
        self._running: dict[str, RequestInFlight] = {}
        self._changed = threading.Condition()  # guards the inbox, _dead and _closing
        self._dead: EngineDied | None = None
        self._closing: Future[EngineReport] | None = None
        self._keys = map(str, itertools.count())
        # A daemon: a process that must exit does not wait for an engine that hangs.
        threading.Thread(target=self._live, args=(build,), daemon=True).start()

    # -- from any thread ------------------------------------------------------------------------

    def submit(
        self, request: GenerateRequest, told: Callable[[TokenChunk], None] | None = None
    ) -> Future[Completion]:
        """The completion to come; of `finish_reason` "error" when its prefix is not held. `told`
        gets its tokens as they come, in the engine's thread: it must not wait for anything.

        Like every future here it raises EngineDied when the engine does not live to answer.
        """
        return self._post(EngineCall(lambda future: self._begin(request, future, told), _promise()))

    def cancel(self, ids: Collection[str]) -> Future[None]:
        """End the requests of these ids that are here; their completions say "cancelled"."""

        def work(future: Future[None]) -> None:
            for key, running in self._running.items():
                if running.id in ids:
                    self._engine.cancel(key)
            future.set_result(None)

        return self._post(EngineCall(work, _promise()))

    def hold(self, version: int, names: tuple[str, ...], kv: Tensor) -> Future[int]:
        """The version, once requests may name it. PublishError for an id that was used before."""

        def work(future: Future[int]) -> None:
            self._ledger.check_new(version)
            self._engine.hold(version, names, kv)
            self._let_go(self._ledger.add(version, names))
            future.set_result(version)

        return self._post(EngineCall(work, _promise(), when_idle=self._drain))

    def drop(self, version: int) -> Future[None]:
        """Serve a version no more; requests in flight over it end first. PublishError for one that
        is not held."""

        def work(future: Future[None]) -> None:
            self._let_go(self._ledger.drop(version))
            future.set_result(None)

        return self._post(EngineCall(work, _promise()))

    def report(self) -> Future[EngineReport]:
        return self._post(EngineCall(lambda future: future.set_result(self._report()), _promise()))

    def close(self) -> Future[EngineReport]:
        """Stop, failing what is in flight. The last report, with the seconds that this took."""
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
        begun = time.perf_counter()
        try:
            self._engine = build()
        except BaseException as error:
            self._fail_all(error)
            self.started.set_exception(error)
            return
        self._start_seconds = time.perf_counter() - begun
        self.started.set_result(None)
        try:
            while self._closing is None:
                self._work_off()
                if self._running:
                    for key, news in self._engine.step():
                        if isinstance(news, Completion):
                            self._end(key, news)
                        elif told := self._running[key].told:
                            told(news)
        except BaseException as error:
            self._fail_all(error)
            with contextlib.suppress(Exception):  # it is dead: how it falls does not matter
                self._engine.close()
            if self._closing is not None and not self._closing.done():
                self._closing.set_exception(EngineDied(f"the engine died before: {error!r}"))
            return
        self._stop(self._closing)

    def _work_off(self) -> None:
        """Do what is due; with nothing in flight, wait until something is."""
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
                job.future.set_exception(EngineDied(f"the engine failed on this: {error!r}"))
                raise

    def _begin(
        self,
        request: GenerateRequest,
        future: Future[Completion],
        told: Callable[[TokenChunk], None] | None,
    ) -> None:
        cartridges = [p for p in request.prefix.parts if p.name.startswith(CARTRIDGE)]
        try:
            for part in cartridges:
                self._ledger.index(part.name.removeprefix(CARTRIDGE), part.version)
        except PublishError as error:
            future.set_result(refused(request, str(error)))
            return
        key = next(self._keys)
        self._engine.add(key, request, stream=told is not None)
        versions = tuple(part.version for part in cartridges)
        self._running[key] = RequestInFlight(future, versions, request.id, told)
        for version in versions:
            self._ledger.begin(version)

    def _end(self, key: str, completion: Completion) -> None:
        ended = self._running.pop(key)
        for version in ended.versions:
            self._let_go(self._ledger.end(version))
        ended.future.set_result(completion)

    def _let_go(self, versions: Iterable[int]) -> None:
        for version in versions:
            self._engine.let_go(version)

    def _report(self) -> EngineReport:
        loads, tokens = self._engine.loads()
        return EngineReport(self._start_seconds, self._engine.first_token_seconds, loads, tokens)

    def _stop(self, closing: Future[EngineReport]) -> None:
        try:
            report = self._report()
            begun = time.perf_counter()
            self._engine.close()
            seconds = time.perf_counter() - begun
        except BaseException as error:
            self._fail_all(error)
            closing.set_exception(error)
            return
        self._fail_all(RuntimeError("it was shut down"))
        closing.set_result(dataclasses.replace(report, stop_seconds=seconds))

    def _fail_all(self, error: BaseException) -> None:
        """Nothing is left waiting: all get the reason, and so does who comes later."""
        with self._changed:
            self._dead = EngineDied(f"the engine serves no more: {type(error).__name__}: {error}")
            self._dead.__cause__ = error
            jobs, self._inbox = self._inbox, deque()
        for future in [job.future for job in jobs] + [r.future for r in self._running.values()]:
            future.set_exception(self._dead)
        self._running = {}


def _promise() -> Future[Any]:
    """A future that nobody can cancel: who gives up waiting does not stop the engine's work."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
