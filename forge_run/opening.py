"""Open the directory of a run and hold it: on this machine, and in an object store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cartridge_forge.forge_run.resuming import UNFINISHED, is_finished, open_directory
from cartridge_forge.plugins.host.run_lease import RunLease, hold_lease
from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.spec.mesh import RunSpec
from cartridge_forge.services.run_directory import LATEST, RunDirectory, storage_error

if TYPE_CHECKING:  # most runs have no store
    from cartridge_forge.plugins.host.run_store import RunMirror, StoredRun, StoreLease


@dataclass(frozen=True)
class OpenRun:
    """Hold an open run. `stored` copies it to the store of `records.store`; None without one. A
    `finished` run is open for reading alone: it has a lease only where it may have to be stored."""

    directory: RunDirectory
    resumed: bool
    lease: RunLease | None
    stored: RunMirror | None = None
    finished: bool = False

    def lost(self) -> str:
        """Return why the run is no longer this command's, "" while it is."""
        lost = "" if self.lease is None else self.lease.lost
        return lost or ("" if self.stored is None else self.stored.lost)

    def end(self) -> RunError | None:
        """Store the run's last state, where it is stored; return the error where that fails."""
        why = "" if self.stored is None else self.stored.end()
        if not why:
            return None
        path = self.directory.path
        return RunError(
            f"{why}; the run is whole in {path}; make the store reachable, then store it with "
            f"--resume {path.name}"
        )


@contextmanager
def opened(
    spec: RunSpec, run_dir: Path | None, resume: str | None, tell: Callable[[str], None]
) -> Iterator[OpenRun]:
    """Hold a new run, or the one to resume, which is fetched from the store where that is ahead of
    this machine. Raises ForgeError."""
    root, url = (run_dir or Path("runs")).absolute(), spec.mesh.records.store
    with ExitStack() as stack:
        stored = None
        if url is not None or "://" in (resume or ""):
            resume, stored = _from_store(spec, root, resume, tell, stack)
        try:
            directory, resumed = open_directory(spec, root, resume, tell)
            finished = resumed and is_finished(directory)
            if finished and url is None:
                yield OpenRun(directory, resumed, None, finished=True)
                return
            lease = stack.enter_context(hold_lease(directory.path, tell))
            if resumed and not finished:
                directory.make_latest()
        except OSError as unusable:
            raise storage_error(unusable, root) from unusable
        mirror = None
        if url is not None:
            mirror = _mirror(url, spec, directory, stored, tell, stack)
        yield OpenRun(directory, resumed, lease, mirror, finished)


def _from_store(
    spec: RunSpec, root: Path, resume: str | None, tell: Callable[[str], None], stack: ExitStack
) -> tuple[str | None, tuple[StoredRun, StoreLease] | None]:
    """Take the lease of the stored run that `resume` means, and fetch it where the store is ahead;
    return what to resume, and the run with its lease. Neither where the store has no such run."""
    from cartridge_forge.plugins.host.run_store import fetch, is_ahead, stored_at, stored_runs
    from cartridge_forge.plugins.host.stored_files import ObjectStore

    mesh, url = spec.mesh.name, spec.mesh.records.store
    if resume is None:
        return None, None
    if "://" in resume:
        run = stored_at(resume)
        if run.mesh != mesh:
            raise CheckpointError(f"{resume} is a run of {run.mesh}, and the mesh is {mesh}")
    else:
        assert url is not None
        runs = {run.id: run for run in stored_runs(ObjectStore(url), mesh)}
        latest = resume in ("", LATEST, UNFINISHED)
        latest_name = (
            (root / mesh / LATEST).resolve().name if (root / mesh / LATEST).exists() else ""
        )
        name = max([*runs, latest_name]) if latest else Path(resume).name
        if name not in runs:
            return resume, None
        run = runs[name]
    lease = _held(run, tell, stack)
    if is_ahead(run, root):
        tell(f"fetching run {run.id} from {run.store.url}")
        try:
            RunDirectory(fetch(run, root)).make_latest()
        except OSError as unusable:
            raise storage_error(unusable, root / mesh / run.id) from unusable
    same_store = url is not None and run.store.url.rstrip("/") == url.rstrip("/")
    if not same_store:  # it goes on here alone, or in another store
        lease.end()
    return (resume if resume == UNFINISHED else run.id), ((run, lease) if same_store else None)


def _mirror(
    url: str,
    spec: RunSpec,
    directory: RunDirectory,
    stored: tuple[StoredRun, StoreLease] | None,
    tell: Callable[[str], None],
    stack: ExitStack,
) -> RunMirror:
    from cartridge_forge.plugins.host.run_store import RunMirror, StoredRun
    from cartridge_forge.plugins.host.stored_files import ObjectStore
    from cartridge_forge.services.roles import writers_apart

    if stored is None or stored[0].id != directory.id:
        run = StoredRun(ObjectStore(url), spec.mesh.name, directory.id)
        stored = run, _held(run, tell, stack)
    mirror = RunMirror(directory, *stored, tell, writers_apart(spec))
    mirror.start()
    return mirror


def _held(run: StoredRun, tell: Callable[[str], None], stack: ExitStack) -> StoreLease:
    """Take the lease of a stored run, and let go of it when `stack` ends."""
    from cartridge_forge.plugins.host.run_store import take_lease

    lease = take_lease(run, tell)
    stack.callback(lease.end)
    threading.Thread(target=lease.keep, daemon=True).start()
    return lease
