"""Write files atomically; append, iterate and format JSON-lines rows; hash and sync files. Keep
room on a run's disk, and say where a user's own files are.

    runs/longhealth/RUN/.reserve     allocated, never written to, hidden

Whoever of the run's processes first meets a full disk deletes it and writes again. The controller
finds it missing before its next step, and ends the run with a checkpoint in the room it left.

    $FORGE_HOME/models/NAME, $FORGE_HOME/checks     base models, and verdicts on them; or
    $XDG_CACHE_HOME/cartridge-forge/..., by default below ~/.cache
    $FORGE_HOME/library                             cartridges; or
    $XDG_DATA_HOME/cartridge-forge/library, by default below ~/.local/share
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cartridge_forge.protocols.errors import CheckpointError, RunError

_OFFSET = time.time() - time.monotonic()

REPOSITORY = Path(__file__).resolve().parents[1]
"""The directory of configs/ and deploy/monitoring/, in a checkout and in an installed wheel."""

IMPORT_FOLDER = Path(__file__).parents[2]
"""The directory that holds the package: what a child process needs on its path to import it."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` to make a file or directory at, and rename it when the block ends.

    A reader, or a crash, finds on disk the old content or the new, never a part. When the block
    fails, `path` stays unchanged.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield fresh
        for inner in (*(fresh.iterdir() if fresh.is_dir() else ()), fresh):
            flush(inner)
        if os.path.lexists(path) and (fresh.is_dir() or path.is_dir()):
            # A directory is renamed neither onto a file nor onto another that is not empty.
            aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")
            path.rename(aside)
            fresh.rename(path)
            _remove(aside)
        else:
            os.replace(fresh, path)
        flush(path.parent)  # the rename is durable only once the folder is synced
    finally:
        _remove(fresh)


def write_atomically(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace a file as a whole, as UTF-8 with the line ends of `text`.

    `mode` is the mode of a new file before the umask, from its creation on.
    """

    def write() -> None:
        with replacing(path) as fresh:
            opener = partial(os.open, mode=mode)
            with open(fresh, "w", encoding="utf-8", newline="", opener=opener) as file:
                file.write(text)

    with_room(path, write)


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]], *, create: bool = True) -> None:
    """Append all rows to a JSON-lines file, or none. Without `create` a missing file is an error.
    Raises RunError for a number that is not finite, and OSError."""
    for row in rows:
        infinite = [k for k, v in row.items() if isinstance(v, float) and not math.isfinite(v)]
        if infinite:
            where = f"{row.get('arm', '')} step {row.get('step', '?')}".strip()
            raise RunError(
                f"{path.name}: every number must be finite: got {infinite[0]} = "
                f"{row[infinite[0]]} at {where}; lower the learning rate and resume from the "
                "last checkpoint"
            )
    data, flags = json_lines(rows).encode(), os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    with_room(path, lambda: _append(path, data, flags | (os.O_CREAT if create else 0)))


def _append(path: Path, data: bytes, flags: int) -> None:
    file = os.open(path, flags, 0o666)
    try:
        size, count = os.fstat(file).st_size, 0
        try:
            while count < len(data):
                count += os.write(file, data[count:])
        except OSError:  # the next row would follow a part of this one
            with suppress(OSError):
                os.ftruncate(file, size)
            raise
    finally:
        os.close(file)


def iter_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file; a missing file and a torn last line have none.

    Raises CheckpointError for an unreadable line before the last, which no killed writer explains.
    """
    if not path.is_file():
        return
    damaged = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if damaged:
                raise CheckpointError(
                    f"{path}:{damaged}: every line but the last must be a JSON object, got a "
                    "damaged line; restore the file, or delete the line"
                )
            if (row := _object(line)) is not None:
                yield row
            elif line.endswith(b"\n"):
                damaged = number
            else:  # still being written: the rest may follow at once and would look like a line
                return


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of `iter_rows` as a list; rollouts.jsonl is better read row by row."""
    return list(iter_rows(path))


def salvage(
    path: Path, is_row: Callable[[dict[str, Any]], bool] = bool
) -> tuple[list[dict[str, Any]], list[int], bool]:
    """Return the whole rows of a JSON-lines file, the numbers of its damaged lines from 1, and
    whether there is a torn last line besides. `is_row` says whether an object is a row of this
    file. A missing file has none of them."""

    def read(line: bytes) -> dict[str, Any] | None:
        row = _object(line)
        return row if row is not None and is_row(row) else None

    rows: list[dict[str, Any]] = []
    damaged = []
    *lines, last = path.read_bytes().split(b"\n") if path.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        row = read(line)
        damaged += [number] if row is None else []
        rows += [] if row is None else [row]
    row = read(last)  # whole, but for its newline
    return [*rows, *([] if row is None else [row])], damaged, bool(last) and row is None


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # torn JSON, or a character cut in two
        return None
    return value if isinstance(value, dict) else None


def json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the text of a JSON-lines file. Raises ValueError for a number that is not finite."""
    # Floats are written as their repr, the shortest text that reads back as the same number:
    # equal numbers are equal bytes, and a row read and written again does not change.
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def utc_text(now: datetime | None = None) -> str:
    """Return `now`, or the current time, as UTC in milliseconds: `2026-07-26T10:15:42.120Z`."""
    moment = (now or datetime.now(UTC)).astimezone(UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def flush(path: Path) -> None:
    """Sync a file, or the names in a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def steady_time() -> float:
    """Return seconds since the epoch that only grow: the host's clock as it was when this process
    began, plus monotonic seconds. A clock that is set later changes no difference of two calls."""
    return _OFFSET + time.monotonic()


RESERVE = ".reserve"
FULL = (errno.ENOSPC, errno.EDQUOT)
LEVELS = 3  # from a run's deepest file, checkpoints/last-state/FILE, up to the run

T = TypeVar("T")


def hold_room(run: Path, count: int) -> None:
    """Reserve at least `count` bytes in a run's directory. Raises OSError where there are none."""
    file = os.open(run / RESERVE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if os.fstat(file).st_size < count:
            os.posix_fallocate(file, 0, count)
    finally:
        os.close(file)


def with_room(path: Path, write: Callable[[], T]) -> T:
    """Return `write()`, which writes at `path` and may be repeated. On a full disk, free the
    reserve of the run that `path` is in, and write again. Raises OSError."""
    try:
        return write()
    except OSError as error:
        if error.errno not in FULL or not _freed(path):
            raise
    return write()


def _freed(path: Path) -> bool:
    for folder in list(path.parents)[:LEVELS]:
        reserve = folder / RESERVE
        if reserve.exists():
            reserve.unlink(missing_ok=True)
            return True
    return False


def models_folder() -> Path:
    """Return the folder of the named base models; it need not exist."""
    return _home() / "models"


def checks_folder() -> Path:
    """Return the folder of the verdicts on base models; it need not exist."""
    return _home() / "checks"


def library_folder() -> Path:
    """Return the folder of the user's cartridges; it need not exist. Without FORGE_HOME it is no
    cache: what is in it cannot be had again."""
    return _home("XDG_DATA_HOME", "~/.local/share") / "library"


def _home(variable: str = "XDG_CACHE_HOME", default: str = "~/.cache") -> Path:
    home = os.environ.get("FORGE_HOME")
    if home:
        return Path(home).expanduser().absolute()
    base = os.environ.get(variable) or default
    return Path(base).expanduser().absolute() / "cartridge-forge"


def model_names() -> list[str]:
    """Return the names of the models that are kept, in order."""
    folder = models_folder()
    folders = folder.iterdir() if folder.is_dir() else ()
    return sorted(p.name for p in folders if (p / "config.json").is_file())


def named_model(name: str) -> Path | None:
    """Return the directory of the kept model of a name, else of the shipped one; None where there
    is neither."""
    folders = (models_folder() / name, REPOSITORY / "models" / name)
    models = (one for one in folders if (one / "config.json").is_file())
    return next(models, None) if Path(name).name == name else None
