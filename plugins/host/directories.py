"""Hold directories that belong to one process and are removed with it, also when it is killed."""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote

from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import check_key


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


SUFFIX = ".tensors"  # keys end with it, temporary files do not
# A shell that outlives the owner: `read` returns when the owner's end of the pipe closes, however
# the owner died. The shell ignores a Ctrl-C and the end of the session.
JANITOR = """trap '' INT TERM HUP
echo
read -r _
for try in 1 2 3; do rm -rf -- "$1" && exit; sleep 1; done"""
JANITOR_SECONDS = 5.0


def file_of(root: Path, key: str) -> Path:
    """Return the file of a key in a directory. Raises PlaneError as `check_key` does."""
    return root / (quote(check_key(key), safe="") + SUFFIX)


def keys_in(root: Path, prefix: str = "") -> list[str]:
    """Return the keys that start with `prefix` and have a file in a directory, sorted. Raises
    FileNotFoundError for a directory that is gone."""
    names = os.listdir(root)
    names_found = (unquote(name.removesuffix(SUFFIX)) for name in names if name.endswith(SUFFIX))
    return sorted(key for key in names_found if key.startswith(prefix))


class MemoryDirectory:
    """Own the new directory `root` until `stop`, or until this process ends, however it ends."""

    def __init__(self, root: Path, lock: int, janitor: subprocess.Popen[bytes]) -> None:
        self.root, self.janitor = root, janitor
        self._lock = lock

    @classmethod
    async def start(cls, base: str | None = None) -> MemoryDirectory:
        """Return a new directory under `base` (/dev/shm, or the temporary directory).

        Directories that dead runs left in `base` are removed first. Raises PlaneError on failure.
        """
        try:
            root, lock = owned_directory(base or _memory_directory(), "cartridge-forge")
            janitor = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
                ["/bin/sh", "-c", JANITOR, "sh", str(root)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                start_new_session=True, cwd="/",
            )  # fmt: skip
            assert janitor.stdout is not None
            with janitor.stdout as ready:  # a line once it ignores signals: in ms
                await asyncio.to_thread(ready.readline)
        except OSError as error:
            raise PlaneError(
                f"cannot start a tensor plane under {base or _memory_directory()}: {error}"
            ) from error
        return cls(root, lock, janitor)

    async def stop(self) -> None:
        """Remove the directory. Files that are mapped stay readable there."""
        shutil.rmtree(self.root, ignore_errors=True)
        # It exits within milliseconds after its input is closed.
        await asyncio.to_thread(self.janitor.communicate, timeout=JANITOR_SECONDS)
        os.close(self._lock)


def _memory_directory() -> str:
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
