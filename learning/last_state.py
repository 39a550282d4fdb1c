"""Keep a trainer's last state on disk, so that the replacement of a lost trainer continues from it.

    last-state/cartridge-0000-000041-9c1d02aa.safetensors   numbers and moments since version 41
    last-state/published-0000-000040-51f0be17.safetensors   the copy published with version 40
    last-state/manifest.json                                {"facts": ..., "files": {...}, ...}

A step writes the parts that it changed and then the manifest, which is renamed into place: it names
every file of the state, so a crash at any point leaves the state before it or the new one, whole.
Files that the manifest does not name are deleted after that. A file's name ends with the CRC of its
tensors: another content never replaces a file that the manifest names. Ranks that hold cartridges
of their own write the parts of these, and rank 0 the manifest.

It survives the trainer's process but not the machine: nothing is flushed to disk. A CRC costs
nothing beside the writing.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from learning.checkpoint import (
    MANIFEST,
    SUFFIX,
    Checkpoint,
    on_host,
    parts_bytes,
    save_tensors,
    united,
)
from learning.ranks import ALONE, ProcessGroup, each
from protocols.errors import CheckpointError
from protocols.reserve import with_room

PARTIAL = ".partial"


class LastState:
    """Write and read the state in the directory `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, str] = {}  # by part: its file, of the state written or read last

    def write(self, state: Checkpoint, writers: ProcessGroup = ALONE) -> None:
        """Replace the state on disk. Parts that the state written or read before has are not
        written again. All `writers` call it, each with its own cartridges."""
        own = with_room(self._path / MANIFEST, lambda: self._fill(state))
        told = writers.gather({"files": own, "facts": state.facts})
        if writers.leads:
            facts = united([one["facts"] for one in told])
            files = {part: file for one in told for part, file in one["files"].items()}
            with_room(self._path / MANIFEST, lambda: self._close(facts, files))
        writers.gather({})  # nobody writes the next state while rank 0 deletes files
        self._files = own

    def _fill(self, state: Checkpoint) -> dict[str, str]:
        """Write the parts; return the names of their files."""
        self._path.mkdir(exist_ok=True)  # no parents: a removed run's directory is not made again
        new = {part: x for part, x in state.parts.items() if part not in self._files}
        wrote = each(self._write, new.items(), parts_bytes(new))
        files = self._files | dict(zip(new, wrote, strict=True))
        return {part: files[part] for part in state.parts}

    def _close(self, facts: dict[str, Any], files: Mapping[str, str]) -> None:
        """Write the manifest and delete the files that it does not name."""
        told = json.dumps({"facts": facts, "files": files})
        whole = json.dumps({"crc32": f"{zlib.crc32(told.encode()):08x}", "state": told})
        partial = self._path / f"{MANIFEST}{PARTIAL}"
        partial.write_text(whole)
        partial.replace(self._path / MANIFEST)
        for file in self._path.iterdir():
            if file.name not in (*files.values(), MANIFEST):
                file.unlink()

    def forget(self) -> None:
        """Write every part of the next state: its line is another than that of the one on disk."""
        self._files = {}

    def read(self, wanted: Callable[[str], bool] = lambda part: True) -> Checkpoint | None:
        """Return the state on disk, of its parts those that are `wanted`; None where none was
        written. Raises CheckpointError for a damaged one, and for one of an earlier version."""
        old = self._path.with_name(self._path.name + SUFFIX)
        if old.exists():
            raise CheckpointError(
                f"the trainer's last state {old} was written by an earlier version of "
                "cartridge-forge; end the run and resume it from its last checkpoint"
            )
        if not (self._path / MANIFEST).exists():
            return None
        try:
            whole = json.loads((self._path / MANIFEST).read_text())
            if f"{zlib.crc32(whole['state'].encode()):08x}" != whole["crc32"]:
                raise ValueError(f"{MANIFEST} does not match its checksum")
            state = json.loads(whole["state"])
            files = {part: file for part, file in state["files"].items() if wanted(part)}
            parts = {part: self._read(part, file) for part, file in files.items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the trainer's last state {self._path} cannot be read: {error}; end the run and "
                "resume it from its last checkpoint"
            ) from error
        self._files = files
        return Checkpoint(state["facts"], parts)

    def _write(self, item: tuple[str, Mapping[str, Tensor]]) -> str:
        """Write a part and its tensors; return the name of its file."""
        part, tensors = item[0], on_host(item[1])
        name = _file_name(part, tensors)
        partial = self._path / f"{name}{PARTIAL}"
        save_tensors(tensors, partial)
        partial.replace(self._path / name)
        return name

    def _read(self, part: str, file: str) -> dict[str, Tensor]:
        tensors = load_file(self._path / file)
        if _file_name(part, tensors) != file:
            raise ValueError(f"{file} does not match its checksum")
        return tensors


def last_version(path: Path) -> int | None:
    """Return the version of the state in the directory `path`, by its manifest alone; None for none
    that can be read."""
    try:
        whole = json.loads((path / MANIFEST).read_text())
        return int(json.loads(whole["state"])["facts"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_name(part: str, tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{part}-{crc:08x}{SUFFIX}"
