"""Read a user's files as named documents: folders, single files and glob patterns.

    data.path -> files (sorted, bounded) -> formats -> UserDocument, or SkippedFile with the reason

A process with limits of time and memory reads the bytes: a small PDF can ask for days of work. A
link in a folder or pattern is followed within it alone.

A file that is named itself must be readable. In a folder or a pattern, an unusable file is reported
and skipped, so that one picture among the notes does not end the run.
"""

from __future__ import annotations

import glob
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cartridge_forge.plugins.documents.formats import READERS, UNICODE, FileText, ReadOptions
from cartridge_forge.plugins.host.limited_process import LimitedProcess, ProcessLimits
from cartridge_forge.plugins.library.names import romanised
from cartridge_forge.protocols.errors import DataError

MOST_FILES = 10_000
NAME_LENGTH = 48  # a cartridge's name has at most 64: leaves room for the number of a part or copy
RESERVED = "none"  # means no document
MOST_FAULTS = 10  # of a file, told one by one


@dataclass(frozen=True)
class ReadLimits:
    """Bound the size of one file and of all together, in bytes, and the work to read one."""

    file: int = 64 * 1024**2
    total: int = 256 * 1024**2
    work: ProcessLimits = field(default_factory=ProcessLimits)


@dataclass(frozen=True)
class UserDocument:
    """Hold one text: `UserDocument("notes.monday", "notes/monday.md", "Monday ...", "9f86...",
    "utf-8")`. `name` is that of its cartridge, `source` the file (with `#3` for its third record),
    `sha256` of the text in UTF-8."""

    name: str
    source: str
    text: str
    sha256: str
    encoding: str


@dataclass(frozen=True)
class SkippedFile:
    """Name a source that is not used, and why; or, as a note, one that is used in an unusual
    way."""

    source: str
    why: str

    def __str__(self) -> str:
        return f"{self.source} {self.why}"


@dataclass(frozen=True)
class ReadResult:
    """Hold the documents read, the files left out, and notes on files read in an unusual way."""

    documents: tuple[UserDocument, ...]
    left_out: tuple[SkippedFile, ...] = ()
    notes: tuple[SkippedFile, ...] = ()


def read_documents(
    paths: Sequence[str], how: ReadOptions | None = None, limits: ReadLimits | None = None
) -> ReadResult:
    """Return every document of the paths: files, folders (with all below them) and patterns
    (`*.md`). Raises DataError for a missing path, a file named itself that cannot be used, a bound
    that is exceeded, and where nothing is left."""
    how, limits = how or ReadOptions(), limits or ReadLimits()
    with LimitedProcess(
        "cartridge_forge.plugins.documents.reading_process:read", limits.work
    ) as process:
        return _read_all(paths, how, limits, process)


def _read_all(
    paths: Sequence[str], how: ReadOptions, limits: ReadLimits, process: LimitedProcess
) -> ReadResult:
    options = {"text_fields": how.text_fields, "encoding": how.encoding}
    gathered = Collection()
    total = 0
    for folder, file, name, sought in _files(paths):
        try:
            data = _bytes(file, limits.file, folder if sought else None)
            total += len(data)
            if total > limits.total:
                raise TotalLimitError(
                    f"{folder}: more than documents.max_total_bytes ({limits.total:,}) in all; "
                    "raise it, or give fewer files"
                )
            texts = process.call({**options, "suffix": file.suffix.lower()}, data)
            file_texts = [FileText(*text) for text in texts]
        except TotalLimitError:
            raise
        except DataError as error:
            if not sought:
                raise DataError(f"{name} {error}") from error
            gathered.left_out.append(SkippedFile(name, str(error)))
            continue
        if how.encoding not in UNICODE and any(
            text.encoding == how.encoding for text in file_texts
        ):
            gathered.notes.append(SkippedFile(name, f"is not UTF-8: read as {how.encoding}"))
        faults = gathered.take_all(name, file_texts)
        if len(faults) == len(file_texts) and not sought:
            why = faults[-1] if faults else "holds no text"
            raise DataError(f"{name} {why}; name a file with text in it")
        if not file_texts:
            gathered.left_out.append(SkippedFile(name, "holds no text"))
    if not gathered.documents:
        raise _no_document(paths, gathered.left_out)
    return ReadResult(tuple(gathered.documents), tuple(gathered.left_out), tuple(gathered.notes))


def require_files(paths: Sequence[str]) -> None:
    """Raise DataError, as `read_documents` does, for a missing path and for empty folders. No file
    is read and no model, so a mistake is answered at once."""
    if next(_files(paths), None) is None:
        raise _no_document(paths)


def _no_document(paths: Sequence[str], left_out: Sequence[SkippedFile] = ()) -> DataError:
    listed = "".join(f"\n  {item}" for item in left_out)
    return DataError(
        f"no document in {', '.join(paths)}: expected {', '.join(READERS)} files{listed}"
    )


class Collection:
    """Collect documents; each name and each text is used once."""

    def __init__(self) -> None:
        self.documents: list[UserDocument] = []
        self.left_out: list[SkippedFile] = []
        self.notes: list[SkippedFile] = []
        self._names: set[str] = set()
        self._texts: dict[str, str] = {}  # by hash: the source that has it

    def take_all(self, name: str, texts: Sequence[FileText]) -> list[str]:
        """Add the texts of a file; return why some are left out. Of records beyond MOST_FAULTS only
        the number is noted."""
        faults = []
        for text in texts:
            source = f"{name}#{text.record}" if text.record else name
            if (why := self._take(name, source, text)) is not None:
                faults.append(why)
                if len(faults) <= MOST_FAULTS:
                    self.left_out.append(SkippedFile(source, why))
        if (more := len(faults) - MOST_FAULTS) > 0:
            why = f"has {more:,} more that cannot be used, of {len(texts):,} records"
            self.left_out.append(SkippedFile(name, why))
        return faults

    def _take(self, file_name: str, source: str, text: FileText) -> str | None:
        """Add a text; return why it is left out, None where it is not."""
        why = text.fault or self._fault(text.text)
        if why is not None:
            return why
        digest = hashlib.sha256(text.text.encode()).hexdigest()
        self._texts[digest] = source
        stem = str(Path(file_name).with_suffix(""))
        name = _free(f"{stem}.{text.record}" if text.record else stem, self._names)
        self.documents.append(UserDocument(name, source, text.text, digest, text.encoding))
        return None

    def _fault(self, text: str) -> str | None:
        if not text.strip():
            return "is empty"
        try:
            digest = hashlib.sha256(text.encode()).hexdigest()
        except UnicodeEncodeError as error:
            return f"has half a character at {error.start} (a lone surrogate); mend its escapes"
        earlier = self._texts.get(digest)
        return None if earlier is None else f"has the same text as {earlier}"


class TotalLimitError(DataError):
    """Raise when all files together exceed a bound, which is no single file's fault."""


def _files(paths: Sequence[str]) -> Iterator[tuple[str, Path, str, bool]]:
    """Yield (path given, file, name to show, whether it was found by a search)."""
    count = 0
    visited: set[str] = set()
    for source in paths:
        path = Path(source)
        if path.is_dir():
            entries = [(file, str(file.relative_to(path)), True) for file in _below(path)]
        elif path.exists():
            entries = [(path, path.name, False)]
        elif glob.has_magic(source):
            matches = [Path(m) for m in sorted(glob.glob(source, recursive=True))]
            entries = [(m, m.name, True) for m in matches if not m.is_dir()]
            if not entries:
                raise DataError(f"no file matches {source}; check data.path")
        else:
            raise DataError(f"there is no file or folder {source}; check data.path")
        for file, name, sought in entries:
            if str(file.absolute()) in visited:
                continue
            visited.add(str(file.absolute()))
            count += 1
            if count > MOST_FILES:
                raise DataError(f"{source}: more than {MOST_FILES:,} files; name a smaller folder")
            yield source, file, name, sought


def _below(folder: Path) -> Iterator[Path]:
    """Return files below a folder, sorted by path, without hidden ones and links to folders."""
    file_paths = []
    for current, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if not f.startswith(".")]
        file_paths += [Path(current) / f for f in files if not f.startswith(".")]
        if len(file_paths) > MOST_FILES:
            break  # the caller refuses them
    return iter(sorted(file_paths))


def _bytes(file: Path, most: int, within: str | None) -> bytes:
    """Return the file's content. `within` is the folder or pattern that it was found by: a link
    that leads out of it is refused. None for a file that the user named."""
    _require_known(file)  # before the file is read
    try:
        resolved = file.resolve(strict=True)
        if within is not None and not resolved.is_relative_to(_root(within)):
            raise DataError("is a link out of its folder; copy the file there, or name it itself")
        # The last name is no link any more, and a pipe put in its place does not hold this up.
        opened = os.fdopen(os.open(resolved, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}; check its permissions") from error
    with opened:
        status = os.fstat(opened.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise DataError("is no plain file; name a file, or a folder of them")
        if status.st_size > most:
            raise DataError(
                f"has {status.st_size:,} bytes, over documents.max_file_bytes ({most:,}); raise "
                "it, or cut the file up"
            )
        data = opened.read(most + 1)  # it may grow while it is read
    if not data:
        raise DataError("is empty")
    return data


def _root(folder: str) -> Path:
    """Return the folder that a search began in: of a pattern, its part before the first sign."""
    parts = Path(folder).parts
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return Path(*parts[:plain]).resolve()


def _require_known(file: Path) -> None:
    if file.suffix.lower() not in READERS:
        raise DataError(
            f"is no file that is read here ({', '.join(READERS)}); convert it to one of them"
        )


def _free(stem: str, names: set[str]) -> str:
    """Return a name that is valid for a cartridge and not taken: letters, digits, `_ . -`."""
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "_", romanised(stem.replace(os.sep, ".")))
    slug = slug.strip("_.-")[:NAME_LENGTH].rstrip("_.-") or "document"
    name, count = slug, 1
    while name in names or name == RESERVED:
        count += 1
        name = f"{slug}_{count}"
    names.add(name)
    return name
