"""Make a directory of mode 0700 that is locked while its owner lives, and remove those of the dead.

The lock, not the process id, shows whether the owner is alive: ids are reused, and containers that
share a directory do not share ids. The kernel drops the lock with the process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "cartridge-forge-"


def owned_directory(base: str) -> tuple[Path, int]:
    """Return a new directory under `base` and the descriptor that locks it, which its caller keeps
    open. Directories that dead owners left there are removed first. Raises OSError."""
    _remove_stale(base)
    hidden = tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base)
    # Locked before the directory gets the name that _remove_stale looks for.
    lock = _try_lock(hidden)
    assert lock is not None
    root = Path(base, f"{PREFIX}{os.getpid()}-{Path(hidden).name[-8:]}")
    os.rename(hidden, root)
    return root, lock


def _try_lock(directory: str) -> int | None:
    """Return a descriptor that locks the directory, or None for one that another process has locked
    or that another user owns."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.geteuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _remove_stale(base: str) -> None:
    """Remove the directories in `base` whose owner has died."""
    for path in Path(base).glob(f"{PREFIX}*"):
        try:
            lock = _try_lock(str(path))
        except OSError:  # another user's, no directory, or removed meanwhile
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
