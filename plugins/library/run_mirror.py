"""Copy a run directory to an object store while the run goes on, from a thread.

A state is stored after each checkpoint, every STORE_SECONDS and at the end. A store that fails
holds up nothing: the run goes on in its directory, the next state is tried later, and has all that
the ones before it would have had.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from cartridge_forge.plugins.library.object_store import MissingError, StoreError
from cartridge_forge.plugins.library.run_store import StoredRun, StoreLease, mark_seen
from cartridge_forge.plugins.library.stored_folder import (
    CONTROLLER,
    LAST_STATE,
    TEACHERS,
    TRAINER,
    StoredFolder,
    pull,
    read_state,
)
from cartridge_forge.protocols.errors import ForgeError
from cartridge_forge.services.run_directory import RunDirectory

LOOK_SECONDS = 0.5
STORE_SECONDS = 30.0
AGAIN_SECONDS = 5.0  # after the first failure; twice that after the second, and so on
MOST_AGAIN_SECONDS = 60.0
END_SECONDS = 15.0  # of the last state
# Made anew by each command, or of one machine alone.
NOT_STORED = ("endpoints.json", "control.token", "teachers.jsonl.owners", "checkpoints/last-state")
OF_ROLES = {"trainer": (TRAINER, "start.json"), "teacher_replay": (TEACHERS, "teachers.jsonl")}


class RunMirror:
    """Copy one run to its place in a store, whose lease is held. `tell` gets lines for the user."""

    def __init__(
        self,
        directory: RunDirectory,
        run: StoredRun,
        lease: StoreLease,
        tell: Callable[[str], None],
        apart: Collection[str] = (),
    ) -> None:
        """Fetch the files that the roles in `apart` write on other hosts."""
        self._directory, self._run, self._lease, self._tell = directory, run, lease, tell
        self._folder = StoredFolder(run.store, run.within(CONTROLLER), directory.path)
        self._apart = [OF_ROLES[role] for role in apart]
        self._over = threading.Event()
        self._failed = ""  # why the last state was not stored
        self._read = 0  # bytes of the events
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def start(self) -> None:
        """Begin to copy. Raises StoreError at once for a store that takes nothing."""
        # It is of an interrupted run; this one starts from its own checkpoint.
        StoredFolder(self._run.store, self._run.within(LAST_STATE), self._directory.path).push([])
        self._store()
        self._thread.start()

    @property
    def lost(self) -> str:
        """Return why the run is no longer this command's, "" while it is."""
        return self._lease.lost

    def end(self) -> str:
        """Store the last state and let go of the run; return why not all is stored, or ""."""
        self._over.set()
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            self._failed = self._failed or f"the last state took longer than {END_SECONDS:g} s"
        return self.lost or self._failed

    def _keep(self) -> None:
        due, wait = time.monotonic() + STORE_SECONDS, AGAIN_SECONDS
        while not self._over.wait(LOOK_SECONDS) and not self.lost:
            if not self._has_checkpoint() and time.monotonic() < due:
                continue
            try:
                self._store()
                if self._failed:
                    self._tell(f"the run is stored in {self._run.store.url} again")
                self._failed, wait = "", AGAIN_SECONDS
                due = time.monotonic() + STORE_SECONDS
            except (ForgeError, OSError) as error:
                if not self._failed:
                    self._tell(f"{error}; the run goes on in {self._directory.path}")
                self._failed = str(error)
                due, wait = time.monotonic() + wait, min(2 * wait, MOST_AGAIN_SECONDS)
        if not self.lost:
            try:
                self._store()
                self._failed = ""
            except (ForgeError, OSError) as error:
                self._failed = str(error)
        self._lease.end()

    def _store(self) -> None:
        """Store the directory as it is. Checkpoints are listed before rows are read, so that the
        rows of each are there. One that is removed meanwhile is left out at the next try."""
        if self.lost:
            raise StoreError(self.lost)
        self._receive()
        for last in (False, False, True):
            try:
                self._folder.push(stored_names(self._directory.path))
                break
            except FileNotFoundError:
                if last or not self._directory.path.is_dir():
                    raise
        mark_seen(self._directory.path, self._folder.state.serial)

    def _receive(self) -> None:
        """Fetch what the run reads of roles on other hosts: what they started from, and what the
        teachers cost."""
        for writer, file in self._apart:
            prefix = self._run.within(writer)
            state = read_state(self._run.store, prefix)
            with suppress(MissingError):  # its writer has replaced it: the next state has it
                names = [file] if file in state.files else []
                pull(self._run.store, prefix, self._directory.path, state, names)

    def _has_checkpoint(self) -> bool:
        """Return whether the events tell of a new checkpoint."""
        try:
            with self._directory.events.open("rb") as file:
                file.seek(self._read)
                fresh = file.read()
        except OSError:  # the run itself ends with that
            return False
        complete = fresh.rfind(b"\n") + 1
        self._read += complete
        return b'"event": "checkpoint"' in fresh[:complete]


def stored_names(path: Path) -> list[str]:
    """Return the files of a run directory that are stored, checkpoints first, without hidden and
    partial ones."""
    checkpoints = [
        file for folder in sorted(path.glob("checkpoints/version-*")) for file in folder.iterdir()
    ]
    other_files = [
        file for file in path.rglob("*") if file.is_file() and "checkpoints" not in file.parts
    ]
    names = [file.relative_to(path).as_posix() for file in (*checkpoints, *other_files)]
    return [
        name
        for name in names
        if not name.startswith(NOT_STORED) and not any(p.startswith(".") for p in name.split("/"))
    ]
