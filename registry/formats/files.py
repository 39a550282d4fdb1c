"""Write cartridge files atomically, and never over existing ones unless forced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocols.errors import DataError
from protocols.files import replacing


@contextmanager
def whole(path: Path, force: bool = False) -> Iterator[Path]:
    """Yield a path beside `path` to make a file or directory at (`protocols.files.replacing`).

    Raises DataError where `path` exists, unless `force`: then it is replaced at the end.
    """
    if os.path.lexists(path) and not force:
        raise DataError(f"{path} is there already; give another path, or --force to replace it")
    if not path.parent.is_dir():
        raise DataError(f"there is no directory {path.parent} to write {path.name} in; make it")
    with replacing(path) as partial:
        yield partial
