"""Memory that passes of different lengths leave goes back to the system."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from actors import base

# A process of an actor keeps what it freed. One block of ten stays, so that nothing is at the end.
HELD = """
import asyncio, json
from actors.base import FreedMemory, keep_freed_memory
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


def test_it_is_done_at_most_once_in_a_time_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    library = CountingLibrary()
    monkeypatch.setattr(base.ctypes, "CDLL", lambda name: library)

    async def after_passes() -> list[int]:
        freed, seen = base.FreedMemory(), []
        monkeypatch.setattr(base, "GIVE_BACK_SECONDS", 0.2)
        for passes, wait in ((1, 0.0), (3, 0.0), (0, 0.5), (0, 0.5), (1, 0.0)):
            for _ in range(passes):
                freed.give_back()
            await asyncio.sleep(wait)
            await asyncio.sleep(0)
            seen.append(library.trims)
        return seen

    # Three passes came too soon: one call for them, at the end of the time.
    assert asyncio.run(after_passes()) == [1, 1, 2, 2, 3]
