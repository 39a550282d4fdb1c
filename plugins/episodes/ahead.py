"""Sample groups of episodes ahead of training, each at its own pace.

    step s begins, with staleness b   ->  sample(s + b) starts `wanted` further groups
    a turn of any of them             ->  is drawn over the newest published version
    sample(s)                         <-  the next `wanted` complete groups, of whichever step

So a slow episode delays no group but its own: it is trained in a later step. A group with a token
older than the bound is dropped when its turn comes, and one more is started in its place.

Which group is complete first depends on timing, and so do the versions of a slow episode's turns.
With `train.staleness` 0 nothing here is used, and a run is deterministic.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cartridge_forge.plugins.chat.episodes import Episode
from cartridge_forge.protocols.spec.learn import LearnSpec
from cartridge_forge.protocols.step import Completion, GenerateRequest
from cartridge_forge.services.clients import Replied
from cartridge_forge.training.records import GenerateCall

T = TypeVar("T")

VLLM_CALLS = 256  # under way at a time


@dataclass(frozen=True)
class TakenGroups(Generic[T]):
    """Hold the groups of one step, in the order of their completion; `started` counts those that
    its sampling started, `dropped` those that were too old for it."""

    groups: Sequence[T]
    started: int
    dropped: int


class GroupsAhead(Generic[T]):
    """Run groups beside each other and hand complete ones to the steps, first to the earliest.

    `play(step, number)` plays one group, which is number `number` of those started for `step`;
    `oldest` returns the oldest version of a group's tokens.
    """

    def __init__(
        self, play: Callable[[int, int], Awaitable[T]], oldest: Callable[[T], int]
    ) -> None:
        self._play, self._oldest = play, oldest
        self._running: set[asyncio.Task[None]] = set()
        self._complete: asyncio.Queue[T | BaseException] = asyncio.Queue()
        self._turns = asyncio.Lock()  # first come, first served: steps sample in their order

    async def take(
        self, step: int, wanted: int, floor: int, missing: Callable[[Sequence[T]], int], rounds: int
    ) -> TakenGroups[T]:
        """Start `wanted` groups for `step`, and return as many complete ones without a token older
        than version `floor`. `missing` says how many further ones a step needs beside those that
        it has, in at most `rounds` rounds. Raises what a group raised."""
        started, dropped = self._start(step, 0, wanted), 0
        async with self._turns:
            groups: list[T] = []
            while True:
                while len(groups) < wanted:
                    group = await self._complete.get()
                    if isinstance(group, BaseException):
                        raise group
                    if self._oldest(group) >= floor:
                        groups.append(group)
                    else:
                        dropped += 1
                        started += self._start(step, started, 1)
                further = missing(groups) if rounds > 0 else 0
                if further <= 0:
                    return TakenGroups(groups, started, dropped)
                rounds, wanted = rounds - 1, wanted + further
                started += self._start(step, started, further)

    async def close(self) -> None:
        """Cancel the groups that are not complete."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        self._running.clear()

    def _start(self, step: int, first: int, count: int) -> int:
        for number in range(first, first + count):
            task = asyncio.create_task(self._run(step, number))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        return count

    async def _run(self, step: int, number: int) -> None:
        try:
            self._complete.put_nowait(await self._play(step, number))
        except Exception as error:  # raised by the step that would have taken it
            self._complete.put_nowait(error)


@dataclass(frozen=True)
class WaitingRequests:
    """Hold the requests of one caller, and the future of their completions."""

    requests: Sequence[GenerateRequest]
    reply: asyncio.Future[list[Completion]]


class JoinedGenerate:
    """Join the requests of many callers into one call of the generators.

    While `at_once` calls are under way, requests wait; the next call has all of them. Generators
    that decode one call after the other would otherwise read the turns of episodes one by one.
    """

    def __init__(self, generate: GenerateCall, at_once: int = 1) -> None:
        self._generate, self._at_once = generate, at_once
        self._waiting: list[WaitingRequests] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def __call__(
        self,
        requests: Sequence[GenerateRequest],
        replied: Replied = None,
        *,
        whole: bool = False,
    ) -> list[Completion]:
        """Return completions in the order of the requests. Raises what the joined call raised.
        Calls are joined, so `whole` means nothing."""
        waiting = WaitingRequests(requests, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._calls) < self._at_once:
            call = asyncio.create_task(self._call())
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)
        completions = await waiting.reply
        if replied is not None:
            replied(completions)
        return completions

    async def _call(self) -> None:
        await asyncio.sleep(0)  # callers that are ready at the same time go together
        while self._waiting:
            joined, self._waiting = self._waiting, []
            await self._answer(joined)

    async def _answer(self, joined: Sequence[WaitingRequests]) -> None:
        try:
            completions = await self._generate([r for w in joined for r in w.requests])
        except Exception as error:  # each caller raises it
            for waiting in joined:
                if not waiting.reply.done():
                    waiting.reply.set_exception(error)
            return
        results = iter(completions)
        for waiting in joined:
            completions_own = [next(results) for _ in waiting.requests]
            if not waiting.reply.done():  # its caller was cancelled
                waiting.reply.set_result(completions_own)


def joined_generate(spec: LearnSpec, generate: GenerateCall) -> JoinedGenerate:
    """Return `generate` for many callers: vLLM takes requests while it decodes others, the embedded
    generator one call after the other."""
    return JoinedGenerate(generate, VLLM_CALLS if spec.generator.backend == "vllm" else 1)


def oldest_version(episodes: Sequence[Episode]) -> int:
    """Return the oldest version of the episodes' tokens; without a token, one that is never old."""
    versions = (v for e in episodes for turn in e.turns for v in turn.versions)
    return min(versions, default=sys.maxsize)
