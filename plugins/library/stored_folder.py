"""Keep the files of a folder in an object store, as one state that is replaced whole.

    <prefix>/state.json      {"serial": 7, "files": {"metrics.jsonl": {"size": 9, "parts": [...]}}}
    <prefix>/parts/<sha256>  PART_BYTES of a file each, the last of them fewer

Parts are named by their content and never change. A new state's parts are written first, then
`state.json`, then the parts that only the state before had are removed. So whoever reads finds one
whole state, whenever the writer ends. Of a file that grew only its last part is written again, and
a file that two checkpoints share is there once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from cartridge_forge.plugins.library.object_store import MissingError, ObjectStore, StoreError
from cartridge_forge.protocols.errors import CheckpointError
from cartridge_forge.protocols.files import replacing

PART_BYTES = 16 * 2**20
SCHEMA = 1
STATE = "state.json"
CONTROLLER, TRAINER, LAST_STATE, TEACHERS = "controller", "trainer", "last-state", "teachers"
TRIES = 3  # of a reader, while a writer replaces the state
Files = Mapping[str, Mapping[str, Any]]  # size and parts by the file's path in the folder


@dataclass(frozen=True)
class StoredState:
    """Hold one state: how many were written before it, its files, and the tag of its object."""

    serial: int
    files: Files
    tag: str | None = None

    def parts(self) -> set[str]:
        return {part for entry in self.files.values() for part in entry["parts"]}


NOTHING = StoredState(0, {})


class StoredFolder:
    """Write the files of `folder` under `prefix` of a store; one writer each. Methods block; they
    raise StoreError, and OSError for the folder."""

    def __init__(self, store: ObjectStore, prefix: str, folder: Path) -> None:
        self._store, self._prefix, self._folder = store, prefix, folder
        self._state: StoredState | None = None
        self._hashed: dict[str, tuple[tuple[int, int, int], Mapping[str, Any]]] = {}

    @property
    def state(self) -> StoredState:
        """Return the state that is stored."""
        if self._state is None:
            self._state = read_state(self._store, self._prefix)
        return self._state

    def push(self, names: Collection[str], entries: Files | None = None) -> int:
        """Make these files the stored state; return the bytes written. `entries` are further files,
        of the state that is stored. Raises StoreError where another wrote a state meanwhile."""
        previous = self.state
        stored, nbytes = previous.parts(), 0
        files = dict(entries or {})
        for name in sorted(names):
            files[name], more = self._put(name, stored)
            nbytes += more
        if files == previous.files:
            return 0
        text = json.dumps({"schema": SCHEMA, "serial": previous.serial + 1, "files": files})
        tag = self._store.replace(f"{self._prefix}/{STATE}", text.encode(), previous.tag)
        if tag is None:
            self._state = None
            raise StoreError(f"{self._prefix} of {self._store.url} was written by another")
        self._state = StoredState(previous.serial + 1, files, tag)
        unused = sorted(previous.parts() - self._state.parts())
        self._store.remove([_part(self._prefix, part) for part in unused])
        return nbytes

    def _put(self, name: str, stored: set[str]) -> tuple[Mapping[str, Any], int]:
        """Write those parts of a file that are not stored; return its size and parts, and the bytes
        written."""
        nbytes = 0
        with (self._folder / name).open("rb") as file:
            status = os.fstat(file.fileno())
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            hashed = self._hashed.get(name)
            if hashed is not None and hashed[0] == mark and stored.issuperset(hashed[1]["parts"]):
                return hashed[1], 0
            parts = []
            remaining = status.st_size  # what is appended meanwhile comes next time
            while remaining > 0 and (data := file.read(min(PART_BYTES, remaining))):
                remaining -= len(data)
                parts.append(hashlib.sha256(data).hexdigest())
                if parts[-1] not in stored:
                    self._store.put(_part(self._prefix, parts[-1]), data)
                    stored.add(parts[-1])
                    nbytes += len(data)
        entry = {"size": status.st_size - remaining, "parts": parts}
        self._hashed[name] = (mark, entry)
        return entry, nbytes


def read_state(store: ObjectStore, prefix: str) -> StoredState:
    """Return the stored state; NOTHING where none was stored. Raises StoreError, and
    CheckpointError for one that cannot be read."""
    stored = store.get(f"{prefix}/{STATE}")
    if stored is None:
        return NOTHING
    try:
        content = json.loads(stored[0])
        if content["schema"] != SCHEMA:
            raise ValueError(f"schema {content['schema']}")
        return StoredState(int(content["serial"]), dict(content["files"]), stored[1])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{store.url}/{prefix}/{STATE} is no state of a stored run ({error}); restore it"
        ) from error


def pull(
    store: ObjectStore, prefix: str, folder: Path, state: StoredState, names: Sequence[str]
) -> None:
    """Write these files of a stored state into a folder, each whole or not at all, and leave those
    that are there already. Raises MissingError where the state was replaced meanwhile, StoreError,
    OSError, and CheckpointError for a damaged part and a path out of the folder."""
    for name in names:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"{store.url}/{prefix}: a file's path must be in it: got {name}")
        target, parts = folder / name, state.files[name]["parts"]
        if _has(target, parts):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target) as fresh, fresh.open("wb") as file:
            for part in parts:
                stored = store.get(_part(prefix, part))
                if stored is None:
                    raise MissingError(f"{store.url}/{prefix}: {name} was replaced meanwhile")
                if hashlib.sha256(stored[0]).hexdigest() != part:
                    raise CheckpointError(f"{store.url}/{prefix}: {name} has a damaged part {part}")
                file.write(stored[0])


def _has(path: Path, parts: Sequence[str]) -> bool:
    """Return whether a file has these parts."""
    if not path.is_file():
        return False
    digests = []
    with path.open("rb") as file:
        while data := file.read(PART_BYTES):
            digests.append(hashlib.sha256(data).hexdigest())
    return digests == list(parts)


def _part(prefix: str, part: str) -> str:
    return f"{prefix}/parts/{part}"
