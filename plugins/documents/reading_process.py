"""Read a file's bytes as texts, in the process that `plugins.documents.reading` starts for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cartridge_forge.plugins.documents.formats import READERS, ReadOptions


def read(request: Mapping[str, Any], data: bytes) -> list[tuple[str, str, int, str]]:
    """Return (text, encoding, record, fault) of each text of the file. Raises DataError."""
    how = ReadOptions(tuple(request["text_fields"]), request["encoding"])
    texts = READERS[request["suffix"]](data, how)
    return [(text.text, text.encoding, text.record, text.fault) for text in texts]
