"""Write the audit log: who asked which cartridge when, as JSON lines.

    {"time": "2026-07-26T10:15:42.120Z", "event": "asked", "key": "ward", "peer": "10.0.0.7",
     "request": "chatcmpl-4f...", "cartridges": ["p1@3"], "strategy": null, "prompt_tokens": 12}

    asked      before anything is sampled; a request that cannot be written down is refused
    changed    the library: `action` is add, words or drop
    refused    a key, a host, an origin or a right that is missing; `path` is the route, and
               `cartridges` has the one that the key is not for

The text of messages and prompts is written only where the server is told to (`http.audit_text`).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from protocols.errors import SpecError
from protocols.files import utc_text
from serving.errors import ApiError


class AuditLog:
    """Append rows to a file that this user alone may read; without a path write nothing. Raises
    SpecError for a file that cannot be opened."""

    def __init__(self, path: str | None, with_text: bool) -> None:
        self.with_text, self._file = with_text, -1
        if path is None:
            return
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise SpecError(
                f"http.audit: cannot write {path}: {error.strerror}; name a file that can be "
                "written, or null"
            ) from error

    def write(self, event: str, key: str, peer: str | None, **facts: Any) -> None:
        """Append one row. Raises ApiError 503 where it cannot be written whole."""
        if self._file < 0:
            return
        row = {"time": utc_text(), "event": event, "key": key, "peer": peer, **facts}
        data = json.dumps(row).encode() + b"\n"
        try:
            whole = os.write(self._file, data) == len(data)
        except OSError:
            whole = False
        if not whole:
            raise ApiError(
                503, "the audit log cannot be written, and nothing is served without it; make "
                "room for it where the server runs", code="audit_unavailable",
            )  # fmt: skip

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
