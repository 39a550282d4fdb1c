"""Find, hold and fetch runs that are kept in an object store (`records.store`).

    s3://bucket/runs/longhealth/20260726T101530Z-3fa9/
    ├── lease.json    who works on the run
    ├── controller/   the run directory, without what the two below have
    ├── trainer/      checkpoints, where the trainer is on another host
    ├── last-state/   the trainer's last state there
    └── teachers/     teachers.jsonl, where teacher_replay is on another host

Each folder has one writer, and is one state (`library.stored_files`). A checkpoint of the trainer
counts once the controller's events tell of it: its rows are stored then.

While a run goes on, a thread copies its directory: a state is stored after each checkpoint, every
STORE_SECONDS and at the end. A store that fails holds up nothing: the run goes on in its directory,
the next state is tried later, and has all that the ones before it would have had.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from cartridge_forge.plugins.host.run_lease import (
    LeaseRecord,
    is_free,
    own_record,
    wait_for_lease,
)
from cartridge_forge.plugins.host.stored_files import (
    CONTROLLER,
    LAST_STATE,
    STATE,
    TEACHERS,
    TRAINER,
    TRIES,
    MissingError,
    ObjectStore,
    StoredFolder,
    StoredState,
    StoreError,
    pull,
    read_state,
)
from cartridge_forge.protocols.errors import CheckpointError, ForgeError, RunError
from cartridge_forge.protocols.files import iter_rows, write_atomically
from cartridge_forge.services.run_directory import RunDirectory

LEASE = "lease.json"
STORED = ".stored"  # in a run directory: which stored state it is, or was before it went on
BEAT_SECONDS = 5.0
STALE_SECONDS = 30.0


@dataclass(frozen=True)
class StoredRun:
    """Name a run in a store: `url` is that of all runs, such as `s3://bucket/runs`."""

    store: ObjectStore
    mesh: str
    id: str

    @property
    def prefix(self) -> str:
        return f"{self.mesh}/{self.id}"

    def within(self, writer: str) -> str:
        return f"{self.prefix}/{writer}"


def stored_at(url: str) -> StoredRun:
    """Return the run of a URL such as `s3://bucket/runs/longhealth/20260726T101530Z-3fa9`. Raises
    RunError for one that names no run."""
    base, _, id = url.rstrip("/").rpartition("/")
    base, _, mesh = base.rpartition("/")
    if not mesh or not id or not urlsplit(base).scheme:
        raise RunError(f"{url} names no run; write it as s3://bucket/runs/MESH/RUN")
    return StoredRun(ObjectStore(base), mesh, id)


def stored_runs(store: ObjectStore, mesh: str) -> list[StoredRun]:
    """Return the runs of a mesh that have a state, the newest last. Raises StoreError."""
    every = [StoredRun(store, mesh, id) for id in store.folders(mesh)]
    return [run for run in every if store.get(f"{run.within(CONTROLLER)}/{STATE}") is not None]


def is_ahead(run: StoredRun, root: Path) -> bool:
    """Return whether the store has a state of the run that the directory under `root` has not
    seen: the run was made, or went on, elsewhere."""
    path = root / run.mesh / run.id
    if not (path / "spec.yaml").is_file():
        return True
    try:
        serial = json.loads((path / STORED).read_text())["serial"]
    except (OSError, ValueError, KeyError, TypeError):
        serial = 0
    return read_state(run.store, run.within(CONTROLLER)).serial > int(serial)


def mark_seen(path: Path, serial: int) -> None:
    """Note in a run directory which stored state it is."""
    write_atomically(path / STORED, json.dumps({"serial": serial}) + "\n")


def fetch(run: StoredRun, root: Path) -> Path:
    """Copy a stored run to `root/<mesh>/<id>`, and return that. Files that are there already are
    not read again, and checkpoints that are not stored are removed. Raises StoreError,
    CheckpointError for a run that is not there, and OSError."""
    path = root / run.mesh / run.id
    for _ in range(TRIES):
        state = read_state(run.store, run.within(CONTROLLER))
        if "spec.yaml" not in state.files:
            have = ", ".join(run.store.folders(run.mesh)) or "none"
            raise CheckpointError(
                f"there is no run at {run.store.url}/{run.prefix}; runs of {run.mesh} there: {have}"
            )
        trained = read_state(run.store, run.within(TRAINER))
        paid = read_state(run.store, run.within(TEACHERS))
        try:
            _fetch(run, path, state, trained, paid)
            return path
        except MissingError:  # its writer has replaced it
            continue
    raise StoreError(f"{run.store.url}/{run.prefix} was replaced while it was read; try again")


def _fetch(
    run: StoredRun, path: Path, state: StoredState, trained: StoredState, paid: StoredState
) -> None:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    (path / "checkpoints").mkdir(exist_ok=True)
    RunDirectory(path).run_state.unlink(missing_ok=True)  # of other rows than those in the store
    # The spec last: a directory without it is no run.
    first = [name for name in state.files if name != "spec.yaml"]
    (path / "spec.yaml").unlink(missing_ok=True)
    pull(run.store, run.within(CONTROLLER), path, state, first)
    recorded = {
        e.get("path") for e in iter_rows(path / "events.jsonl") if e["event"] == "checkpoint"
    }
    names = [
        n for n in trained.files if not n.startswith("checkpoints/") or n.split("/")[1] in recorded
    ]
    pull(run.store, run.within(TRAINER), path, trained, names)
    # The teachers may have been on the controller's host since.
    sizes = {name: entry["size"] for name, entry in state.files.items()}
    more = [name for name, entry in paid.files.items() if entry["size"] > sizes.get(name, 0)]
    pull(run.store, run.within(TEACHERS), path, paid, more)
    stored = {name.split("/")[1] for name in (*state.files, *names) if "/" in name}
    for checkpoint in (path / "checkpoints").glob("version-*"):
        if checkpoint.name not in stored:
            shutil.rmtree(checkpoint)
    mark_seen(path, state.serial)
    pull(run.store, run.within(CONTROLLER), path, state, ["spec.yaml"])


class StoreLease:
    """Hold the lease of a stored run. `lost` says why it is no longer held, "" while it is."""

    def __init__(self, run: StoredRun, record: LeaseRecord, tag: str) -> None:
        self._run, self._record, self._tag = run, record, tag
        self._over = threading.Event()
        self._writing = threading.Lock()
        self.lost = ""

    def keep(self) -> None:
        """Beat until `end`, or until the lease is lost; run it in a thread."""
        while not self._over.wait(BEAT_SECONDS) and not self.lost:
            self._beat(self._record.beat + 1)

    def end(self) -> None:
        """Let go of the lease, so that the next command need not wait."""
        if not self._over.is_set() and not self.lost:
            self._beat(-1)
        self._over.set()

    def _beat(self, beat: int) -> None:
        with self._writing:
            record = replace(self._record, beat=beat)
            try:
                tag = self._run.store.replace(_lease(self._run), _text(record), self._tag)
                if tag is None:
                    self._look()
                    return
            except StoreError:  # whoever waits sees no beat
                return
            self._record, self._tag = record, tag

    def _look(self) -> None:
        """Find why the lease has another tag: a beat of ours whose answer was lost, or another
        owner."""
        stored = self._run.store.get(_lease(self._run))
        now = None if stored is None else _read(stored[0])
        if stored is not None and now is not None and now.owner == self._record.owner:
            self._record, self._tag = now, stored[1]
            return
        by = "nobody" if now is None else f"process {now.pid} on {now.host}"
        self.lost = f"the lease of run {self._run.id} in {self._run.store.url} is held by {by} now"


def take_lease(run: StoredRun, tell: Callable[[str], None]) -> StoreLease:
    """Take the lease of a stored run, as `plugins.host.run_lease` does of a directory. Raises
    RunError, which names the owner, for a run that another command works on, and StoreError."""
    record, token = own_record(), ""

    def attempt(waited: float) -> LeaseRecord | None:
        nonlocal token
        stored = run.store.get(_lease(run))
        holder, old = (None, None) if stored is None else (_read(stored[0]), stored[1])
        if not is_free(holder) and waited <= STALE_SECONDS:
            return holder
        tag = run.store.replace(_lease(run), _text(record), old)
        if tag is None:  # another was faster: see who
            return attempt(0.0)
        token = tag
        return None

    remedy = "wait for its end, end it, or name another run"
    wait_for_lease(attempt, f"{run.id} in {run.store.url}", remedy, STALE_SECONDS, tell)
    return StoreLease(run, record, token)


def _lease(run: StoredRun) -> str:
    return f"{run.prefix}/{LEASE}"


def _text(record: LeaseRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def _read(text: bytes) -> LeaseRecord | None:
    try:
        return LeaseRecord(**json.loads(text))
    except (ValueError, TypeError):
        return None


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
