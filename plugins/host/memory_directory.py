"""Own a directory in memory with one file a key, which goes with its owner, by whatever death.

Nothing here imports torch: a host's relay needs no more than this of its files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote

from cartridge_forge.plugins.host.owned_directory import owned_directory
from cartridge_forge.protocols.errors import PlaneError
from cartridge_forge.protocols.step import check_key

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
