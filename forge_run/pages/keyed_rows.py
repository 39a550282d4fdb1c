"""Find rows of a large JSON-lines file by a key, without holding them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forge_run.pages.row_index import number_of
from forge_run.pages.tail import GrowingFile, parsed


class KeyedRows:
    """Find rows of one file; of two with one key the last. `key` returns a row's, None for a row
    that nobody looks for. May be used from several threads."""

    def __init__(self, path: Path, key: Callable[[Mapping[str, Any]], str | None]) -> None:
        self._file = GrowingFile(path)
        self._key = key
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}

    def find(self, key: str) -> dict[str, Any] | None:
        """Return the row of a key, None where there is none yet."""
        with self._lock:
            self._refresh()
            at = self._at.get(number_of(key))
            if at is None:
                return None
            with self._file.path.open("rb") as file:
                file.seek(at)
                row: dict[str, Any] = json.loads(file.readline())
                return row

    def _refresh(self) -> None:
        if self._file.begin():
            self._at = {}
        for at, line in self._file.lines():
            row = parsed(line)
            if row is not None and (key := self._key(row)) is not None:
                self._at[number_of(key)] = at
