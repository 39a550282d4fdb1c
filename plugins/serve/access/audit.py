"""Write the audit log: who asked which cartridge when, as JSON lines.

    {"time": "2026-07-26T10:15:42.120Z", "event": "asked", "key": "ward", "peer": "10.0.0.7",
     "request": "chatcmpl-4f...", "cartridges": ["p1@3"], "strategy": null, "prompt_tokens": 12}

    asked      before anything is sampled; a request that cannot be written down is refused
    changed    the library: `action` is add, words or drop
    refused    a key, a host, an origin or a right that is missing; `path` is the route, and
               `cartridges` has the one that the key is not for

Who has no key could fill the disk with refusals: of those NOBODY_ROWS are written at once and then
NOBODY_PER_MINUTE, and the next row tells in `unwritten` how many were not.

A row that a full disk cut is taken back, or the next one begins on a line of its own. Where the
file was moved or removed, as log rotation does, a new one is begun, and the server's log says so.

The text of messages and prompts is written only where the server is told to (`http.audit_text`).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.chat.wire.errors import ApiError
from cartridge_forge.protocols.errors import SpecError
from cartridge_forge.protocols.files import utc_text

_log = logging.getLogger(__name__)
NOBODY = "-"  # a caller without a key
NOBODY_ROWS, NOBODY_PER_MINUTE = 60, 10  # refusals of such: 14,400 rows of some 250 bytes a day


class AuditLog:
    """Append rows to a file that this user alone may read; without a path write nothing. Raises
    SpecError for a file that cannot be opened."""

    def __init__(
        self, path: str | None, with_text: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.with_text, self._file, self._clock = with_text, -1, clock
        self._room, self._at, self._unwritten = float(NOBODY_ROWS), clock(), 0
        self._path, self._torn = path, False
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._open(path)
        except OSError as error:
            raise SpecError(
                f"http.audit: cannot write {path}: {error.strerror}; name a file that can be "
                "written, or null"
            ) from error

    def write(self, event: str, key: str, peer: str | None, **facts: Any) -> None:
        """Append one row. Raises ApiError 503 where it cannot be written whole."""
        if self._path is None:
            return
        row = {"time": utc_text(), "event": event, "key": key, "peer": peer, **facts}
        try:
            complete = self._append(self._path, json.dumps(row).encode() + b"\n")
        except OSError:
            complete = False
        if not complete:
            raise ApiError(
                503, "the audit log cannot be written, and nothing is served without it; make "
                "room for it where the server runs", code="audit_unavailable",
            )  # fmt: skip

    def _append(self, path: str, data: bytes) -> bool:
        """Write a row at the end of the file that is at `path` now. Returns whether it is whole;
        what was written of another is taken back, or else ended by the next row. Raises OSError."""
        if not self._is_at(path):
            if self._file >= 0:
                _log.warning("the audit log %s was moved or removed; a new one is begun", path)
                os.close(self._file)
                self._file = -1
            self._open(path)
        if self._torn:
            data = b"\n" + data
        size = os.fstat(self._file).st_size
        complete = os.write(self._file, data) == len(data)
        if not complete:
            self._torn = True
            os.ftruncate(self._file, size)
        self._torn = not complete and self._ends_within_a_row(path)
        return complete

    def _is_at(self, path: str) -> bool:
        """Return whether the open file still is the one of this name."""
        if self._file < 0:
            return False
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._file))
        except FileNotFoundError:
            return False

    def _open(self, path: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        self._torn = self._ends_within_a_row(path)

    def _ends_within_a_row(self, path: str) -> bool:
        if not os.fstat(self._file).st_size:
            return False
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"

    def refused(self, key: str, peer: str | None, **facts: Any) -> None:
        """Append the row of a refusal, or count one of NOBODY where too many came. Raises as
        `write`."""
        if key == NOBODY:
            now = self._clock()
            gained = (now - self._at) * NOBODY_PER_MINUTE / 60
            self._room, self._at = min(float(NOBODY_ROWS), self._room + gained), now
            if self._room < 1:
                self._unwritten += 1
                return
            self._room -= 1
        self.write("refused", key, peer, **facts, **self._left_out())

    def _left_out(self) -> dict[str, int]:
        facts = {"unwritten": self._unwritten} if self._unwritten else {}
        self._unwritten = 0
        return facts

    def close(self) -> None:
        if self._unwritten:
            with suppress(ApiError):
                self.write("refused", NOBODY, None, **self._left_out())
        if self._file >= 0:
            os.close(self._file)
        self._file, self._path = -1, None
