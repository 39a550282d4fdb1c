"""Hold a run directory for one command: `.lease`, with owner, host and heartbeat.

    {"owner": "9c1d...", "host": "node-3", "pid": 4711, "began": "8123/4026531836/b0d4...",
     "beat": 17}

The owner raises `beat` every BEAT_SECONDS. Another command that wants the run reads the lease:

    an owner of this machine that is gone    taken over at once
    an owner of this machine that lives      refused, with its host and process
    an owner elsewhere                       watched: refused at its next beat, taken over without
                                             one for STALE_SECONDS

Readers decide one after another, under the file's lock. No clocks of two machines are compared. An
owner that finds another's name in the file was taken for dead, and must end.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cartridge_forge.protocols.errors import RunError
from cartridge_forge.services.proc_info import began

FILE = ".lease"
BEAT_SECONDS = 2.0
STALE_SECONDS = 15.0
LOOK_SECONDS = 0.25
LOCK_SECONDS = 10.0


@dataclass(frozen=True)
class LeaseRecord:
    """Hold the content of a lease. `began` tells the process from later ones of its id, and this
    machine from others; `beat` counts heartbeats, and is -1 once the owner has let go."""

    owner: str
    host: str
    pid: int
    began: str
    beat: int


class RunLease:
    """Hold the lease of one run. `lost` says why it is no longer held, "" while it is."""

    def __init__(self, run: Path, record: LeaseRecord) -> None:
        self._path, self._record = run / FILE, record
        self._over = threading.Event()
        self.lost = ""

    def keep(self) -> None:
        """Beat until `end`, or until the lease is lost; run it in a thread."""
        while not self._over.wait(BEAT_SECONDS):
            try:
                with _locked(self._path) as file:
                    self._beat(file, self._record.beat + 1)
            except FileNotFoundError:
                self.lost = f"the run directory {self._path.parent} was removed or moved"
            except OSError:  # a full disk; whoever waits sees no beat
                continue
            if self.lost:
                return

    def end(self) -> None:
        """Let go of the lease, so that the next command need not wait."""
        self._over.set()
        with suppress(OSError), _locked(self._path) as file:
            self._beat(file, -1)

    def _beat(self, file: int, beat: int) -> None:
        now = _read(file)
        if now is None or now.owner != self._record.owner:
            by = "nobody" if now is None else f"process {now.pid} on {now.host}"
            self.lost = f"the lease of run {self._path.parent.name} is held by {by} now"
            return
        self._record = replace(self._record, beat=beat)
        _write(file, self._record)


@contextmanager
def hold_lease(run: Path, tell: Callable[[str], None]) -> Iterator[RunLease]:
    """Hold the lease of a run's directory, heartbeats included. `tell` gets a line when it waits.
    Raises RunError, which names the owner, for a run that another command works on, and OSError
    for a directory that cannot be written."""
    lease = RunLease(run, _take(run, tell))
    beating = threading.Thread(target=lease.keep, daemon=True)
    beating.start()
    try:
        yield lease
    finally:
        lease.end()
        beating.join(BEAT_SECONDS)


def own_record() -> LeaseRecord:
    """Return the content of a lease that this process takes now."""
    me = os.getpid()
    return LeaseRecord(uuid.uuid4().hex, socket.gethostname(), me, began(me), 0)


def is_free(record: LeaseRecord | None) -> bool:
    """Return whether nobody holds a lease of this content: let go of, or its owner has ended."""
    return (
        record is None
        or record.beat < 0
        or (_is_here(record) and began(record.pid) != record.began)
    )


def wait_for_lease(
    attempt: Callable[[float], LeaseRecord | None],
    run: str,
    remedy: str,
    stale_s: float,
    tell: Callable[[str], None],
) -> None:
    """Repeat `attempt` until it returns None: the lease is taken. Else it returns the lease of
    another owner; its argument is how long that was waited for. `run` names the run, in errors
    too. Raises RunError, with `remedy`, for an owner that is seen to live."""
    first: LeaseRecord | None = None
    since = time.monotonic()
    while (record := attempt(time.monotonic() - since)) is not None:
        if first is None and not _is_here(record):
            tell(
                f"run {run} was held by process {record.pid} on {record.host}; it is taken over "
                f"after {stale_s:g} s without a heartbeat"
            )
        first = first or record
        if _is_here(record) or record != first:
            raise RunError(f"run {run} is held by process {record.pid} on {record.host}; {remedy}")
        time.sleep(LOOK_SECONDS)


def _take(run: Path, tell: Callable[[str], None]) -> LeaseRecord:
    path, record = run / FILE, own_record()
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def attempt(waited: float) -> LeaseRecord | None:
        with _locked(path) as file:
            holder = _read(file)
            if not is_free(holder) and waited <= STALE_SECONDS:
                return holder
            _write(file, record)
            return None

    remedy = f"wait for its end, end it (forge stop {run.name}), or name another run"
    wait_for_lease(attempt, run.name, remedy, STALE_SECONDS, tell)
    return record


def _is_here(record: LeaseRecord) -> bool:
    """Return whether the owner is a process that can be seen from here: of the same boot of the
    same machine, and of the same namespace."""
    return record.began.partition("/")[2] == began(os.getpid()).partition("/")[2]


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """Open the file, which must be there, and lock it for the moment of a decision."""
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        deadline = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        yield file
    finally:
        os.close(file)


def _read(file: int) -> LeaseRecord | None:
    """Return the record; None for a new file, and for one that a full disk cut off."""
    try:
        return LeaseRecord(**json.loads(os.pread(file, 4096, 0)))
    except (ValueError, TypeError):
        return None


def _write(file: int, record: LeaseRecord) -> None:
    # Of a fixed length: a beat takes no new room of a full disk, and leaves nothing of the last.
    text = json.dumps(asdict(record)).ljust(511) + "\n"
    os.pwrite(file, text.encode(), 0)
    os.ftruncate(file, len(text))  # after something else of more bytes
