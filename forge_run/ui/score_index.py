"""Find the scores of a response's tokens in token_scores.jsonl, by arm, step and id."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forge_run.ui.row_index import number_of
from forge_run.ui.tail import GrowingFile, parsed
from protocols.records.token_scores import decoded


class ScoreIndex:
    """Find rows of one file. May be used from several threads."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._lock = threading.Lock()
        self._at: dict[int, int] = {}

    def refresh(self) -> None:
        """Index what was added to the file."""
        with self._lock:
            if self._file.begin():
                self._at = {}
            for at, line in self._file.lines():
                if (row := parsed(line)) is not None:
                    self._at[_key(row)] = at

    def of(self, row: Mapping[str, Any]) -> list[float | None] | None:
        """Return doc_kl in nats at each token of a row of rollouts.jsonl, None for a token without
        a loss; None in all where nothing was recorded of the row."""
        with self._lock:
            at = self._at.get(_key(row))
            if at is None:
                return None
            with self._file.path.open("rb") as file:
                file.seek(at)
                found = json.loads(file.readline())
        return decoded(found["kl"])


def _key(row: Mapping[str, Any]) -> int:
    return number_of(f"{row.get('arm')}/{row.get('step')}/{row.get('id')}")
