"""Tell processes which cartridges of a library others have changed, without a look at each.

    library/.changes     #9f86d081884c7d65    drawn, so that a file in its place is another
                         patient_01           a name a line, appended after each change of a
                         patient_07           version or of its words

A reader keeps its place in the file. What changes the library by other means writes no line, so a
reader must look at all cartridges now and then besides.
"""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from cartridge_forge.plugins.library.names import is_name

CHANGES = ".changes"
MOST_BYTES = 1 << 20  # the file then begins anew
HEAD_BYTES = 16


def note_change(directory: Path, name: str) -> None:
    """Append the name of a changed cartridge. A disk that takes no line is no error: the change
    itself is made."""
    path = directory / CHANGES
    with suppress(OSError):
        if path.exists() and path.stat().st_size > MOST_BYTES:
            path.unlink()
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            head = "" if os.fstat(file).st_size else f"#{secrets.token_hex(HEAD_BYTES // 2)}\n"
            os.write(file, f"{head}{name}\n".encode())
        finally:
            os.close(file)


class ChangeReader:
    """Read the names that were appended since the last call."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / CHANGES
        self._head, self._size = self._state()
        self._stamp = 0, 0

    def read(self) -> set[str] | None:
        """Return the changed names, or None where some may be missing, since another file stands in
        its place."""
        try:
            state = os.stat(self._path)
            stamp = state.st_size, state.st_mtime_ns
        except OSError:
            stamp = 0, 0
        if stamp == self._stamp:
            return set()
        self._stamp = stamp
        head, size = self._state()
        if self._size and (head != self._head or size < self._size):
            self._head, self._size = head, size
            return None
        if not size:
            return set()
        with self._path.open("rb") as opened:
            opened.seek(self._size)
            lines = opened.read()
        complete = lines[: lines.rfind(b"\n") + 1]
        self._head, self._size = head, self._size + len(complete)
        return set(filter(is_name, complete.decode("ascii", "replace").splitlines()))

    def _state(self) -> tuple[bytes, int]:
        """Return the first line of the file and its size, nothing where there is none."""
        try:
            with self._path.open("rb") as opened:
                return opened.readline(HEAD_BYTES + 2), os.fstat(opened.fileno()).st_size
        except OSError:
            return b"", 0
