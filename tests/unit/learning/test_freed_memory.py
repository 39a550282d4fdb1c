"""Memory that passes of different lengths leave goes back to the system."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import pytest

from cartridge_forge.learning import ranks

# A process of an actor keeps what it freed. One block of ten stays, so that nothing is at the end.
HELD = """
import asyncio, json
from cartridge_forge.actors.base import keep_freed_memory
from cartridge_forge.learning.ranks import FreedMemory
keep_freed_memory()
def held():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Anonymous"):
            return int(line.split()[1]) // 1024
blocks = [bytearray(1 << 16) for _ in range(3000)]
kept = blocks[::10]
full = held()
del blocks
freed = held()
async def give_back():
    FreedMemory().give_back()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
asyncio.run(give_back())
print(json.dumps([full, freed, held()]))
"""


def test_what_is_free_between_blocks_in_use_is_given_back() -> None:
    told = subprocess.run(
        [sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=60
    )
    full, freed, left = json.loads(told.stdout)
    blocks = 3000 * 2**16 / 2**20  # MiB; a tenth of them is in use
    assert full - freed < 0.1 * blocks
    assert freed - left > 0.8 * blocks


class CountingLibrary:
    """Count the calls of glibc's `malloc_trim`."""

    trims = 0

    def malloc_trim(self, pad: int) -> int:
        self.trims += 1
        return 1


@dataclass(eq=False)
class HandTimer:
    """Stand in for a timer of the event loop."""

    loop: HandLoop
    when: float
    call: Callable[[], None]

    def cancel(self) -> None:
        self.loop.due.remove(self)


class HandLoop:
    """Stand in for the event loop, with a clock set by hand."""

    def __init__(self) -> None:
        self.now = 100.0
        self.due: list[HandTimer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[..., None], *given: object) -> HandTimer:
        self.due.append(HandTimer(self, when, partial(call, *given)))
        return self.due[-1]

    def pass_until(self, now: float) -> None:
        self.now = now
        for timer in [each for each in self.due if each.when <= now]:
            self.due.remove(timer)
            timer.call()


def test_it_is_done_once_in_a_time_and_when_no_pass_follows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, loop = CountingLibrary(), HandLoop()
    monkeypatch.setattr(ranks.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(ranks.asyncio, "get_running_loop", lambda: loop)
    freed = ranks.FreedMemory()
    assert (ranks.GIVE_BACK_SECONDS, ranks.IDLE_SECONDS) == (2.0, 0.5)
    seen = []
    for now, passes in (
        (100.0, 1), (100.5, 3),  # at once, then too soon
        (100.9, 0), (101.0, 0),  # no pass for half a second
        (101.2, 1), (101.6, 1), (102.0, 1), (102.4, 1), (102.8, 1), (102.9, 0), (103.0, 0),  # busy
        (110.0, 1),
    ):  # fmt: skip
        loop.now = now
        for _ in range(passes):
            freed.give_back()
        loop.pass_until(now)
        seen.append(library.trims)
    assert seen == [1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 3, 4]
