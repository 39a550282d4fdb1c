"""Memory that passes of different lengths leave goes back to the system."""

from __future__ import annotations

import json
import subprocess
import sys

from actors.base import GIVE_BACK_SECONDS, FreedMemory

# A process of an actor keeps what it freed. One block of ten stays, so that nothing is at the end.
HELD = """
import json
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
FreedMemory().give_back()
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


def test_it_is_done_at_most_every_few_seconds() -> None:
    now = [100.0]
    freed = FreedMemory(lambda: now[0])
    assert freed.give_back()
    assert not freed.give_back()
    now[0] += GIVE_BACK_SECONDS - 0.1
    assert not freed.give_back()
    now[0] += 0.1
    assert freed.give_back()
