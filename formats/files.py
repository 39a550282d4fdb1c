"""Files that are whole or not there."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from learning.checkpoint import flush
from protocols.errors import DataError


@contextmanager
def whole(path: Path, force: bool = False) -> Iterator[Path]:
    """A path beside `path`, not there yet, to make a file or directory at; when the block ends it
    is flushed and renamed to `path`, and when it fails it is removed.

    Raises DataError where `path` is there, unless `force`: then it is replaced at the end.
    """
    if os.path.lexists(path) and not force:
        raise DataError(f"{path} is there already; give another path, or --force to replace it")
    if not path.parent.is_dir():
        raise DataError(f"there is no directory {path.parent} to write {path.name} in; make it")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield partial
        for inner in (*(partial.iterdir() if partial.is_dir() else ()), partial):
            flush(inner)
        _replace(partial, path)
        flush(path.parent)
    finally:
        _remove(partial)


def _replace(partial: Path, path: Path) -> None:
    """A directory is renamed neither onto a file nor onto another that is not empty: what is there
    goes aside first."""
    if not os.path.lexists(path) or not (partial.is_dir() or path.is_dir()):
        partial.replace(path)
        return
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
    path.rename(aside)
    partial.rename(path)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
