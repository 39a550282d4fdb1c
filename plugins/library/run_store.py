"""Find, hold and fetch runs that are kept in an object store (`records.store`).

    s3://bucket/runs/longhealth/20260726T101530Z-3fa9/
    ├── lease.json    who works on the run
    ├── controller/   the run directory, without what the two below have
    ├── trainer/      checkpoints, where the trainer is on another host
    ├── last-state/   the trainer's last state there
    └── teachers/     teachers.jsonl, where teacher_replay is on another host

Each folder has one writer, and is one state (`registry.stored_folder`). A checkpoint of the trainer
counts once the controller's events tell of it: its rows are stored then.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

from cartridge_forge.plugins.library.object_store import MissingError, ObjectStore, StoreError
from cartridge_forge.plugins.library.run_lease import (
    LeaseRecord,
    is_free,
    own_record,
    wait_for_lease,
)
from cartridge_forge.plugins.library.stored_files import (
    CONTROLLER,
    STATE,
    TEACHERS,
    TRAINER,
    TRIES,
    StoredState,
    pull,
    read_state,
)
from cartridge_forge.protocols.errors import CheckpointError, RunError
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
    """Take the lease of a stored run, as `services.run_lease` does of a directory. Raises RunError,
    which names the owner, for a run that another command works on, and StoreError."""
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
