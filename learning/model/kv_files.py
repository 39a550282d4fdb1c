"""Keep documents' KV in files while a run goes on, so that one process of a host reads a document
and the others map its KV."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

TIMES_FREE = 8  # the disk has this many times the bytes of all files free, or none is added


class KVFiles:
    """Keep the KV of one model, in its type, in `directory`, which one run has for itself."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self, ids: Sequence[int]) -> Tensor | None:
        """Return the KV [L, 2, H_kv, T, D] of a document's tokens, mapped from its file; None where
        there is none that can be read."""
        try:
            return load_file(self._file(ids))["kv"]
        except (OSError, SafetensorError, KeyError):
            return None

    def keep(self, ids: Sequence[int], kv: Tensor) -> None:
        """Write a document's KV, unless all files would take a large part of the disk's free room,
        or that fails: nobody depends on it."""
        file = self._file(ids)
        partial = file.with_suffix(f".{os.getpid()}")
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            held = sum(one.stat().st_size for one in self._directory.iterdir())
            if shutil.disk_usage(self._directory).free < TIMES_FREE * (held + kv.nbytes):
                return
            save_file({"kv": kv.contiguous()}, partial)
            partial.replace(file)
        except (OSError, SafetensorError):
            with contextlib.suppress(OSError):
                partial.unlink()

    def _file(self, ids: Sequence[int]) -> Path:
        digest = hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()
        return self._directory / f"{digest[:32]}.safetensors"
