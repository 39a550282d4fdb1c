"""Follow JSON-lines files that grow: a look at one costs a stat, and reads only what was added.

A resumed run replaces its files by shorter ones. Such a file is read anew, and `generation` goes up
so that whoever holds rows of before drops them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 4 * 1024 * 1024


class GrowingFile:
    """Yield the whole lines that were added to a file, with the byte offset of each."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.size = 0  # bytes of whole lines that were read
        self._looked: tuple[int, int] | None = None  # inode and bytes of the last look

    def begin(self) -> bool:
        """Look at the file. Returns whether rows that were read before are gone: it was replaced,
        cut or removed."""
        try:
            status = self.path.stat()
            now = (status.st_ino, status.st_size)
        except FileNotFoundError:
            now = (0, 0)
        previous, self._looked = self._looked, now
        if previous is None or (now[0] == previous[0] and now[1] >= self.size):
            return False
        lost = self.size > 0
        self.size = 0
        self.generation += lost
        return lost

    @property
    def grew(self) -> bool:
        """Return whether the last look found bytes that were not read."""
        return self._looked is not None and self._looked[1] > self.size

    def lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the offset and the bytes of each whole line that was added since."""
        if not self.grew:
            return
        tail = b""
        with self.path.open("rb") as file:
            file.seek(self.size)
            while block := file.read(BLOCK_BYTES):
                *complete, tail = (tail + block).split(b"\n")
                for line in complete:
                    at, self.size = self.size, self.size + len(line) + 1
                    yield at, line


class FollowedRows:
    """Hold the rows of a file that is small enough for memory, such as metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        self.file = GrowingFile(path)
        self.rows: list[dict[str, Any]] = []

    @property
    def mark(self) -> list[int]:
        """Return [generation, rows]: equal marks stand for equal rows."""
        return [self.file.generation, len(self.rows)]

    def refresh(self) -> None:
        """Read what was added. A damaged line, which a resumed run removes, is left out."""
        if self.file.begin():
            self.rows = []
        for _, line in self.file.lines():
            if (row := parsed(line)) is not None:
                self.rows.append(row)


def parsed(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line, None where it is damaged."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
