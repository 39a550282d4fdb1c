"""Keep what the trainer and the external teachers write, on hosts that share no directory with the
controller's, in the object store of `records.store`.

A store that fails holds up a step by one call at most: the files stay on this host, and are tried
again after AGAIN_SECONDS, by a checkpoint at once.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.object_store import ObjectStore, StoreError
from cartridge_forge.plugins.library.stored_folder import (
    CONTROLLER,
    LAST_STATE,
    TEACHERS,
    TRAINER,
    StoredFolder,
    pull,
    read_state,
)
from cartridge_forge.protocols.spec.services import StoredPlace

AGAIN_SECONDS = 60.0


class KeptFolder:
    """Store files of a run's directory on this host, at most one state at a time."""

    def __init__(self, location: StoredPlace, writer: str, run: Path) -> None:
        self.store, self.place, self.run = ObjectStore(location.url), location, run
        self._folder = StoredFolder(self.store, location.within(writer), run)
        self._writing = threading.Lock()
        self._again = 0.0  # when a failing store is tried again

    def push(
        self, *patterns: str, now: bool = False, files: Mapping[str, Any] | None = None
    ) -> None:
        """Store the files that match. A failure is logged. `now`: try also
        soon after one. `files` are further files, of the stored state."""
        with self._writing:
            if not now and time.monotonic() < self._again:
                return
            try:
                matches = [file for pattern in patterns for file in self.run.glob(pattern)]
                names = [
                    file.relative_to(self.run).as_posix()
                    for file in matches
                    if file.is_file() and not file.name.endswith(".partial")
                ]
                self._folder.push(names, files)
                self._again = 0.0
            except StoreError as error:
                self._again = time.monotonic() + AGAIN_SECONDS
                logging.getLogger(__name__).warning("%s; kept in %s", error, self.run)

    def stored(self) -> Mapping[str, Any]:
        """Return the files of the stored state; none where the store does not answer."""
        try:
            return self._folder.state.files
        except StoreError:
            return {}

    def fetch(self, writer: str, under: str) -> None:
        """Write the stored files of a writer whose paths begin with `under` to this host. Raises
        StoreError."""
        prefix = self.place.within(writer)
        state = read_state(self.store, prefix)
        names = [name for name in state.files if name.startswith(under)]
        pull(self.store, prefix, self.run, state, names)


class TrainerFiles:
    """Store a trainer's checkpoints and last state, and fetch them to a new host."""

    def __init__(self, location: StoredPlace, run: Path) -> None:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._checkpoints = KeptFolder(location, TRAINER, run)
        self._last_state = KeptFolder(location, LAST_STATE, run)

    def keep_last_state(self) -> None:
        self._last_state.push("checkpoints/last-state/*")

    def keep_checkpoints(self) -> None:
        """Store all checkpoints that are here, beside the newest that is stored: the controller's
        rows may not reach a newer one yet."""
        stored = self._checkpoints.stored()
        newest = max((n.split("/")[1] for n in stored if n.startswith("checkpoints/")), default="")
        newest_files = {
            n: entry for n, entry in stored.items() if n.startswith(f"checkpoints/{newest}/")
        }
        self._checkpoints.push(
            "checkpoints/version-*/*", "start.json", now=True, files=newest_files
        )

    def fetch_last_state(self) -> None:
        """Replace the last state here by that of the trainer before this one, wherever that was.
        Raises StoreError."""
        shutil.rmtree(self._last_state.run / "checkpoints" / "last-state", ignore_errors=True)
        self._last_state.fetch(LAST_STATE, "checkpoints/last-state/")

    def fetch_checkpoint(self, path: Path) -> None:
        """Fetch a checkpoint that is not here: of a trainer on another host, or of a run that began
        on one host alone. Raises StoreError."""
        for writer in (TRAINER, CONTROLLER):
            if not path.is_dir():
                self._checkpoints.fetch(writer, f"checkpoints/{path.name}/")


class LedgerFile:
    """Store the ledger of the external teachers, so that no answer is paid twice."""

    def __init__(self, location: StoredPlace, ledger: Path) -> None:
        ledger.parent.mkdir(parents=True, exist_ok=True)
        self._folder, self._ledger = KeptFolder(location, TEACHERS, ledger.parent), ledger

    def fetch(self) -> None:
        """Fetch the ledger where it is not here. Raises StoreError."""
        for writer in (TEACHERS, CONTROLLER):
            if not self._ledger.exists():
                self._folder.fetch(writer, self._ledger.name)

    def keep(self) -> None:
        self._folder.push(self._ledger.name)
