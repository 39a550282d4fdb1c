"""Notice in every process of a store's host that the store's process has ended.

A call that waits for an ended store returns once Monarch has asked for its state, which it does
every 20 s (`forge_run.launch`). The kernel tells at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections.abc import AsyncIterator

from cartridge_forge.services.proc_info import began


class StoreWatch:
    """Bound waits for the store in process `pid`, which began as `services.proc_info.began` tells.
    The process of another host is not watched."""

    def __init__(self, pid: int, began: str) -> None:
        self._pid, self._began = pid, began
        self._opened = False
        self._descriptor: int | None = None
        self._waits: dict[asyncio.AbstractEventLoop, set[asyncio.Timeout]] = {}
        self.ended = False

    def __reduce__(self) -> tuple[type[StoreWatch], tuple[int, str]]:
        return StoreWatch, (self._pid, self._began)

    @contextlib.asynccontextmanager
    async def bounded(self, seconds: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the body after `seconds`, or at once when the store has ended."""
        self._open()
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(0 if self.ended else seconds) as limit:
            waits = self._waits.setdefault(loop, set())
            if not waits and self._descriptor is not None:
                loop.add_reader(self._descriptor, self._see, loop)
            waits.add(limit)
            try:
                yield
            finally:
                waits.discard(limit)
                if not waits:
                    del self._waits[loop]
                    if self._descriptor is not None:
                        loop.remove_reader(self._descriptor)

    def _see(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._descriptor is not None
        self.ended = True
        loop.remove_reader(self._descriptor)  # it stays readable
        for limit in self._waits[loop]:
            limit.reschedule(loop.time())

    def _open(self) -> None:
        """Open the process where it is of this host, once."""
        if self._opened:
            return
        self._opened = True
        ticks, _, host = self._began.partition("/")
        if began(self._pid).partition("/")[2] != host:
            return
        with contextlib.suppress(ProcessLookupError):
            self._descriptor = os.pidfd_open(self._pid)
            weakref.finalize(self, os.close, self._descriptor)
        # Looked at once it is open: another process may have its id by now.
        self.ended = self._descriptor is None or began(self._pid).partition("/")[0] != ticks
