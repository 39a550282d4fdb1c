"""Make a directory of mode 0700 that is locked while its owner lives, and remove those of the dead.

The lock, not the process id, shows whether the owner is alive: ids are reused, and containers that
share a directory do not share ids. The kernel drops the lock with the process.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from pathlib import Path


def owned_directory(base: str, prefix: str) -> tuple[Path, int]:
    """Return a new directory PREFIX-PID-EIGHT under `base` and the descriptor that locks it, which
    its caller keeps open. Directories of such names that dead owners left there are removed first,
    and no others: `base` may be the temporary directory of every program. Raises OSError."""
    _remove_stale(base, prefix)
    hidden = tempfile.mkdtemp(prefix=f".{prefix}-", dir=base)
    # Locked before the directory gets the name that _remove_stale looks for.
    lock = _try_lock(hidden)
    assert lock is not None
    root = Path(base, f"{prefix}-{os.getpid()}-{Path(hidden).name[-8:]}")
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


def _remove_stale(base: str, prefix: str) -> None:
    """Remove the directories in `base` whose owner has died."""
    for path in Path(base).glob(f"{prefix}-*"):
        if re.fullmatch(rf"{prefix}-\d+-[a-z0-9_]{{8}}", path.name) is None:
            continue
        try:
            lock = _try_lock(str(path))
        except OSError:  # another user's, no directory, or removed meanwhile
            continue
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
