"""Keep room on a run's disk for its last checkpoint: a file that is freed when the disk is full.

    runs/longhealth/RUN/.reserve     allocated, never written to, hidden

Whoever of the run's processes first meets a full disk deletes it and writes again. The controller
finds it missing before its next step, and ends the run with a checkpoint in the room it left.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

NAME = ".reserve"
FULL = (errno.ENOSPC, errno.EDQUOT)
LEVELS = 3  # from a run's deepest file, checkpoints/last-state/FILE, up to the run

T = TypeVar("T")


def hold_room(run: Path, count: int) -> None:
    """Reserve at least `count` bytes in a run's directory. Raises OSError where there are none."""
    file = os.open(run / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < count:
            os.posix_fallocate(file, 0, count)
    finally:
        os.close(file)


def with_room(path: Path, write: Callable[[], T]) -> T:
    """Return `write()`, which writes at `path` and may be repeated. On a full disk, free the
    reserve of the run that `path` is in, and write again. Raises OSError."""
    try:
        return write()
    except OSError as error:
        if error.errno not in FULL or not _freed(path):
            raise
    return write()


def _freed(path: Path) -> bool:
    for folder in list(path.parents)[:LEVELS]:
        reserve = folder / NAME
        if reserve.exists():
            reserve.unlink(missing_ok=True)
            return True
    return False
