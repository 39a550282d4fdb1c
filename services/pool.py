"""A pool of actor replicas: one process mesh each, every call bounded in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from protocols.errors import ForgeError, RunError

T = TypeVar("T")


class Pool:
    """Replicas of one role. `failed` is asked for a death that was reported meanwhile.

    A user's error inside an actor (any ForgeError) is raised here as itself; anything else that
    an actor raises, a death or a timeout is a RunError that names the role and the replica.
    """

    def __init__(self, role: str, actors: Sequence[Any], timeout_s: float) -> None:
        self.role = role
        self.actors = list(actors)
        self._timeout_s = timeout_s

    def __len__(self) -> int:
        return len(self.actors)

    async def call(self, replica: int, method: str, *args: Any) -> Any:
        """One call to one replica."""
        endpoint = getattr(self.actors[replica], method)

        async def ask() -> Any:  # a mesh known to be dead refuses at the call, not in the await
            return await endpoint.call_one(*args)

        return await bounded(ask(), self._timeout_s, f"{self.role}[{replica}].{method}")

    async def fanout(self, method: str, *args: Any) -> list[Any]:
        """The same call to every replica; the first failure is raised once all have ended."""
        return await gather(self.call(i, method, *args) for i in range(len(self)))

    async def split(
        self, items: Sequence[T], work: Callable[[int, Sequence[T]], Awaitable[list[Any]]]
    ) -> list[Any]:
        """Share items among replicas (every len(self)-th to each); the answers come back in order.

        `work(replica, share)` answers one result an item.
        """
        count = min(len(self), len(items))
        shares = await gather(work(i, items[i::count]) for i in range(count))
        answers: list[Any] = [None] * len(items)
        for i, share in enumerate(shares):
            answers[i::count] = share
        return answers


async def gather(calls: Any) -> list[Any]:
    """Await all, then raise the first failure: no call is left running unobserved."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


async def bounded(future: Any, timeout_s: float, what: str) -> Any:
    """The result of a Monarch future within `timeout_s`, failures as the errors they are."""

    async def wait() -> Any:
        return await future

    try:
        return await asyncio.wait_for(wait(), timeout_s)
    except TimeoutError as error:
        raise RunError(
            f"{what} did not answer within {timeout_s:g} s; raise call_timeout_s in the mesh file "
            "if the work is really that long"
        ) from error
    except Exception as error:  # ActorError, SupervisionError: Monarch's own and the actor's
        cause = getattr(error, "exception", None)
        if isinstance(cause, ForgeError):
            raise cause from error
        lines = [line for line in str(cause or error).strip().splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else "no message"
        raise RunError(f"{what} failed: {type(cause or error).__name__}: {reason}") from error
