"""A file system of a few MiB, and how it is filled."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

FILLER = "filler"  # the file that takes all room


@contextmanager
def disk(mib: int = 24) -> Iterator[Path]:
    """A folder, of its own file system where the test may mount one."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "disk"
        root.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(root)]
        mounted = os.getuid() == 0 and not subprocess.run(mount, capture_output=True).returncode
        try:
            yield root
        finally:
            if mounted:
                subprocess.run(["umount", "--lazy", str(root)], check=True)


def fill(root: Path) -> bool:
    """Take all room of a disk; False where the folder is none of its own."""
    if not os.path.ismount(root):
        return False
    with (root / FILLER).open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(2**12))
    return True
