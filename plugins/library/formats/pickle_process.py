"""Read a `.pt` in the process that `registry.formats.hazyresearch` starts for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.formats import forge, hazyresearch


def convert(request: Mapping[str, Any], data: bytes) -> None:
    """Write the cartridge in `path` as a safetensors file at `into`. Raises DataError."""
    forge.write_file(hazyresearch.parse(Path(request["path"])), Path(request["into"]))
