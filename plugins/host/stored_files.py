"""Keep what the trainer and the external teachers write, on hosts that share no directory with the
controller's, in the object store of `records.store`.

A store that fails holds up a step by one call at most: the files stay on this host, and are tried
again after AGAIN_SECONDS, by a checkpoint at once.

`StoredFolder` has the files of a folder in an object store, as one state that is replaced whole.

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
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from cartridge_forge.protocols.errors import CheckpointError, RunError
from cartridge_forge.protocols.files import replacing
from cartridge_forge.protocols.packages import extra_command
from cartridge_forge.protocols.spec.services import StoredPlace

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


CONNECT_SECONDS = 5
CALL_SECONDS = 60  # of one request, with its bytes
RETRY_SECONDS = 20  # after which no request is tried again
RETRIES = 4
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
# What the clients of the stores read from the environment, beside the proxies.
VARIABLES = (
    *ENDPOINTS, "AWS_ALLOW_HTTP", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ROLE_ARN", "AWS_ROLE_SESSION_NAME",
    "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID",
)  # fmt: skip

T = TypeVar("T")


class StoreError(RunError):
    """Report an object store that refuses a request, or that cannot be reached."""


class MissingError(StoreError):
    """Report an object that is not there."""


class ObjectStore:
    """Give access to the objects under a URL such as `s3://bucket/runs`; names are relative to it.
    Methods block; all raise StoreError."""

    def __init__(self, url: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ImportError as error:
            remedy = f"run `{extra_command('object-store')}`"
            raise StoreError(f"records.store {url} needs obstore; {remedy}") from error
        self.url = url
        self._client: Any = obstore
        # Options that are given replace the environment's, AWS_ALLOW_HTTP among them.
        plain = any(os.environ.get(name, "").startswith("http://") for name in ENDPOINTS)
        options: dict[str, Any] = {}
        if not url.startswith("file://"):
            times = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5)}
            options = {
                "client_options": {
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                    "timeout": timedelta(seconds=CALL_SECONDS),
                    "allow_http": plain,
                },
                "retry_config": {
                    "max_retries": RETRIES,
                    "retry_timeout": timedelta(seconds=RETRY_SECONDS),
                    "backoff": {**times, "base": 2},
                },
            }
        self._store: Any = self._called(lambda: from_url(url, **options))

    def get(self, name: str) -> tuple[bytes, str] | None:
        """Return an object's bytes and its tag, which changes with them; None for no object."""

        def read() -> tuple[bytes, str]:
            reply = self._client.get(self._store, name)
            return bytes(reply.bytes()), str(reply.meta["e_tag"])

        try:
            return self._called(read)
        except MissingError:
            return None

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in place of one that is there."""
        self._called(lambda: self._client.put(self._store, name, data, use_multipart=False))

    def replace(self, name: str, data: bytes, tag: str | None) -> str | None:
        """Write an object where it still has this tag, None where there must be none. Return the
        new tag; None where it has changed, and nothing is written."""
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode = "create" if tag is None else {"e_tag": tag}

        def write(mode: Any) -> str:
            return str(self._client.put(self._store, name, data, mode=mode)["e_tag"])

        try:
            return self._called(lambda: write(mode))
        except NotImplementedError:  # a folder: read, compare and write are three steps
            current = self.get(name)
            if current is None or current[1] != tag:
                return None
            return self._called(lambda: write("overwrite"))
        except (AlreadyExistsError, PreconditionError):
            return None

    def folders(self, name: str) -> list[str]:
        """Return the names of the folders in one, sorted."""
        listing = self._called(lambda: self._client.list_with_delimiter(self._store, name))
        return sorted(str(path).rpartition("/")[2] for path in listing["common_prefixes"])

    def remove(self, names: Sequence[str]) -> None:
        """Remove objects; one that is not there is no error."""
        if names:
            self._called(lambda: self._client.delete(self._store, list(names)))

    def _called(self, call: Callable[[], T]) -> T:
        from obstore import exceptions

        cause: Exception
        try:
            return call()
        except (NotImplementedError, exceptions.AlreadyExistsError, exceptions.PreconditionError):
            raise
        except FileNotFoundError as error:
            if "NoSuchBucket" not in str(error):
                raise MissingError(f"{self.url} has no such object") from error
            cause, why = error, "there is no such bucket; make it, or correct records.store"
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            cause = error
            why = (
                f"it refuses the credentials of the environment ({_code(error)}); set those that "
                "may list, read, write and delete there"
            )
        except (exceptions.BaseError, OSError, ValueError) as error:
            cause, why = error, str(error).partition("\n")[0].strip()
        raise StoreError(f"records.store {self.url}: {why}") from cause


def _code(error: Exception) -> str:
    """Return the service's own word for a refusal, such as InvalidAccessKeyId."""
    _, separator, tail = str(error).partition("<Code>")
    return tail.partition("<")[0] if separator else type(error).__name__
