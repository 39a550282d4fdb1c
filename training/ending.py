"""End a run step by step, each step whatever became of those before it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable


class RunEnding:
    """Run the steps that end a run, and collect in `failures` those that failed or took too long.
    A disk without room, a directory that was removed or a process that hangs stops none of the
    others."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    async def do(
        self, what: str, step: Callable[[], Awaitable[object] | object], limit_s: float = 5.0
    ) -> BaseException | None:
        """Run one step within `limit_s` seconds; return its error, None for none. A step that is
        no coroutine is not interrupted."""
        try:
            async with asyncio.timeout(limit_s):
                result = step()
                if inspect.isawaitable(result):
                    await result
        except BaseException as error:  # Monarch's own panics are no Exceptions
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            late = isinstance(error, TimeoutError) and not str(error)
            why = f"not done within {limit_s:g} s" if late else str(error) or repr(error)
            self.failures.append(f"{what}: {why}")
            return error
        return None
