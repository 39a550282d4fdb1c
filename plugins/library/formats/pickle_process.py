"""Read a `.pt` in the process that `hazyresearch` or `kv_cache` starts for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.formats import forge, hazyresearch, kv_cache


def convert(request: Mapping[str, Any], data: bytes) -> None:
    """Write the cartridge in `path`, or with `cache` the tensors of the KV cache there, as a
    safetensors file at `into`. Raises DataError."""
    path, into = Path(request["path"]), Path(request["into"])
    if request["cache"]:
        kv_cache.unpack(path, into)
    else:
        forge.write_file(hazyresearch.parse(path), into)
