"""Store versioned cartridges in a directory, each checked when it is added.

    library/patient_01/3/cartridge.safetensors    a cartridge in format `library.formats.forge`
    library/patient_01/3/manifest.json
    library/patient_01/3/terms.json               the words of its text, if known (library.terms)
    library/patient_01/3/document.txt             its text, if it was given
    library/patient_01/last                       the newest version that ever existed
    library/patient_01/tags/best                  the version with the tag `best`
    library/.changes                              the names of what changed (library.changes)

A version is written under a temporary name and renamed, so it is whole or absent. Its number is
never used again, not even after it was dropped, so NAME@VERSION never changes its meaning. Only
safetensors are read: no pickle.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cartridge_forge.plugins.library.changes import note_change
from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, made_for, require_fit
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.forge import (
    FILE,
    MANIFEST,
    CartridgeManifest,
    manifest_of,
    read_file,
    read_manifest,
    write_manifest,
)
from cartridge_forge.plugins.library.names import (
    AUTO,
    LATEST,
    TAG,
    VERSION,
    CartridgeName,
    is_name,
    listing,
    parse_cartridge,
)
from cartridge_forge.plugins.library.terms import Passages, read_terms, write_terms
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.files import FULL, flush, write_atomically
from cartridge_forge.protocols.records.run_files import TERMS

LAST, INCOMING, TAGS = "last", ".incoming", "tags"
DOCUMENT = "document.txt"
ABANDONED_SECONDS = 3600
_NUMBER = re.compile(VERSION)


@dataclass(frozen=True)
class CartridgeVersion:
    """Hold a version's manifest, the path of its file, and those of its text and of the text's
    terms, which need not be there."""

    manifest: CartridgeManifest
    path: Path

    @property
    def key(self) -> tuple[str, int]:
        return self.manifest.name, self.manifest.version

    @property
    def terms(self) -> Path:
        return self.path.parent / TERMS

    @property
    def document(self) -> Path:
        return self.path.parent / DOCUMENT


class CartridgeStore:
    """Store cartridges for one base model. Every method may be called from any thread. Docstrings
    say which methods read whole files. Raises DataError, with rule and remedy."""

    def __init__(self, directory: Path, base: BaseModelInfo) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.base = base
        self.directory.mkdir(parents=True, exist_ok=True)
        for folder in (self.directory / INCOMING).glob("*"):  # of a process that was killed
            old = time.time() - folder.stat().st_mtime > ABANDONED_SECONDS
            if old and not _is_in_use(folder):  # the clock may have been set forward
                shutil.rmtree(folder, ignore_errors=True)

    def folders(self) -> list[str]:
        """Return the names that have a directory, sorted; all versions of one may be dropped."""
        with os.scandir(self.directory) as entries:
            return sorted(e.name for e in entries if is_name(e.name) and e.is_dir())

    def existing(self) -> Iterator[str]:
        """Yield the names that have a version, sorted."""
        return (name for name in self.folders() if self.versions(name))

    def names(self) -> list[str]:
        return list(self.existing())

    def versions(self, name: str) -> list[int]:
        """Return the versions that exist, oldest first; none for an unknown name."""
        directory = f"{self.directory}/{name}"
        return [v for v in self.numbers(name) if os.path.isfile(f"{directory}/{v}/{MANIFEST}")]

    def numbers(self, name: str) -> list[int]:
        """Return the versions that have a directory, damaged ones too, oldest first."""
        return sorted(number for number, is_version in self._numbered(name).items() if is_version)

    def _numbered(self, name: str) -> dict[int, bool]:
        """Return whether it is a directory, of all in a cartridge's directory that has a version's
        number for its name."""
        if not is_name(name):
            return {}
        try:
            with os.scandir(f"{self.directory}/{name}") as entries:
                return {int(e.name): e.is_dir() for e in entries if _NUMBER.fullmatch(e.name)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def every_name(self) -> list[str]:
        """Return the names of all cartridges, also of those whose every version is damaged."""
        return [name for name in self.folders() if self.numbers(name)]

    def is_readable(self) -> bool:
        """Return whether the directory is there and can be listed."""
        return os.access(self.directory, os.R_OK | os.X_OK) and self.directory.is_dir()

    def get(self, wanted: CartridgeName) -> CartridgeVersion:
        """Return the version or tag that `wanted` names, or the newest. Raises DataError."""
        versions = self.versions(wanted.name)
        if not versions:
            have = listing(self.existing()) or "none"
            raise DataError(f"there is no cartridge {wanted.name}; the library has {have}")
        version = versions[-1] if wanted.version is None else wanted.version
        if wanted.tag is not None:
            tags = self.tags(wanted.name)
            if wanted.tag not in tags:
                have = ", ".join(tags) or "none"
                raise DataError(f"cartridge {wanted.name} has no tag {wanted.tag}; it has {have}")
            version = tags[wanted.tag]
        if version not in versions:
            have = ", ".join(map(str, versions))
            raise DataError(f"cartridge {wanted.name} has no version {version}; it has {have}")
        return self._entry(wanted.name, version)

    def newest(self, name: str) -> CartridgeVersion | None:
        """Return the newest version, None where there is none. Raises DataError for a damaged
        one."""
        versions = self.versions(name)
        return self._entry(name, versions[-1]) if versions else None

    def tags(self, name: str) -> dict[str, int]:
        """Return versions by tag; a dropped version takes its tags with it."""
        if not is_name(name):
            return {}
        folder, tags = f"{self.directory}/{name}/{TAGS}", dict[str, int]()
        try:
            names = sorted(n for n in os.listdir(folder) if re.fullmatch(TAG, n))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        for tag in names:
            with suppress(OSError, ValueError):  # removed meanwhile, or what no version is
                tags[tag] = int(Path(folder, tag).read_text())
        versions = self.versions(name) if tags else []
        return {tag: version for tag, version in tags.items() if version in versions}

    def tag(self, wanted: CartridgeName, tag: str) -> CartridgeVersion:
        """Give a version the tag `tag`, and take it from any other version of the cartridge."""
        if not re.fullmatch(TAG, tag) or tag == LATEST:
            raise DataError(
                f"{tag!r} is no tag; write letters, digits and _ . -, at most 32, a letter first; "
                f"{LATEST} is always the newest"
            )
        entry = self.get(wanted)
        path = self.directory / wanted.name / TAGS / tag
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, str(entry.manifest.version))
        return entry

    def untag(self, name: str, tag: str) -> None:
        path = self.directory / name / TAGS / tag
        if not (is_name(name) and re.fullmatch(TAG, tag) and path.is_file()):
            self.get(CartridgeName(name, tag=tag))  # which says what is there
        path.unlink()

    def prunable(self, name: str, keep: int) -> list[int]:
        """Return versions that are neither among the newest `keep` nor tagged, oldest first."""
        if keep < 1:
            raise DataError(f"a library keeps at least 1 version of a cartridge: got {keep}")
        tagged = self.tags(name).values()
        return [v for v in self.versions(name)[:-keep] if v not in tagged]

    def entries(self, name: str) -> list[CartridgeVersion]:
        """Return the versions that are whole, oldest first."""
        return self.sorted_out(name)[0]

    def damaged(self, name: str) -> dict[int, str]:
        """Return what is wrong with each version that is not whole."""
        return self.sorted_out(name)[1]

    def sorted_out(self, name: str) -> tuple[list[CartridgeVersion], dict[int, str]]:
        """Return the versions that are whole, oldest first, and what is wrong with each other."""
        entries, faults = [], {}
        for version in self.numbers(name):
            try:
                entries.append(self._entry(name, version))
            except DataError as error:
                if (self.directory / name / str(version)).is_dir():  # not dropped meanwhile
                    faults[version] = str(error)
        return entries, faults

    def named(self, text: str) -> CartridgeName:
        """Return the name that a name, or the path of a version in the store and never outside,
        stands for; looks nothing up."""
        try:
            return parse_cartridge(text)
        except ValueError:
            path = Path(os.path.normpath(self.directory / text))
        inside = path.is_relative_to(self.directory)
        parts = path.relative_to(self.directory).parts if inside else ()
        if parts[2:] in ((), (FILE,)) and len(parts) >= 2 and re.fullmatch(VERSION, parts[1]):
            return CartridgeName(parts[0], int(parts[1]))
        raise DataError(
            "a local cartridge is named NAME or NAME@VERSION, or by its path in the library, "
            "NAME/VERSION; add it to the library first: forge cartridges add, or POST "
            "/admin/cartridges/NAME"
        )

    @contextmanager
    def incoming(self) -> Iterator[Path]:
        """Yield the path of a file for `add`; what is left of it at the end is removed."""
        folder = self.directory / INCOMING / secrets.token_hex(8)
        folder.parent.mkdir(exist_ok=True)  # never the library itself, where it has vanished
        folder.mkdir()
        in_use = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(in_use, fcntl.LOCK_EX)
        try:
            yield folder / FILE
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(in_use)

    def add(
        self, name: str, file: Path, source: Mapping[str, Any], passages: Passages = ()
    ) -> CartridgeVersion:
        """Check an incoming file and add it as the next version of `name`, with the terms of its
        passages if they are known; reads the whole file."""
        if not is_name(name) or name == AUTO:
            raise DataError(
                f"{name!r} is no cartridge's name; write letters, digits and _ . -, at most 64, a "
                f"letter or digit first, and not {AUTO}, which stands for the router's choice"
            )
        cartridge = read_file(file)
        require_fit(cartridge, self.base)
        cartridge, folder = made_for(cartridge.with_source(source), self.base), file.parent
        if passages:
            write_terms(folder / TERMS, {name: passages})
        while True:
            version = self._last(name) + 1
            write_manifest(folder, manifest_of(cartridge, file, name, version))
            for path in (file, folder / MANIFEST, folder):
                flush(path)
            (self.directory / name).mkdir(exist_ok=True)
            try:
                folder.rename(self.directory / name / str(version))
            except OSError:
                if not (self.directory / name / str(version)).exists():
                    raise
                continue  # another process took the number: try the next
            self._note_last(name, version)
            flush(self.directory / name)
            note_change(self.directory, name)
            return self._entry(name, version)

    def describe(self, entry: CartridgeVersion, passages: Passages) -> None:
        """Set the terms of a version's passages, for the router."""
        write_terms(entry.terms, {entry.manifest.name: passages})
        note_change(self.directory, entry.manifest.name)

    def keep_document(self, entry: CartridgeVersion, text: str) -> None:
        """Set the text that a version replaces, for the verification of its answers."""
        write_atomically(entry.document, text)

    def passages(self, entry: CartridgeVersion) -> Passages:
        """Return the terms of a version's passages; none where its text is not known."""
        return read_terms(entry.terms).get(entry.manifest.name, ())

    def drop(self, name: str, version: int | None = None) -> list[int]:
        """Remove a version, damaged or not, or all of them; returns those that were removed."""
        numbers = self.numbers(name)
        if not numbers or version not in (None, *numbers):
            self.get(CartridgeName(name, version))  # which says what is there
        dropped = numbers if version is None else [version]
        last = self._last(name)
        try:
            self._note_last(name, last)
        except OSError as error:
            if error.errno not in FULL:
                raise
            for number in dropped:  # damaged from here on, which makes room for the note
                (self.directory / name / str(number) / FILE).unlink(missing_ok=True)
            self._note_last(name, last)
        for number in dropped:
            # Renamed first, so that a version is whole or absent while it is removed.
            discarded = self.directory / INCOMING / secrets.token_hex(8)
            discarded.parent.mkdir(exist_ok=True)
            (self.directory / name / str(number)).rename(discarded)
            shutil.rmtree(discarded)
        note_change(self.directory, name)
        return dropped

    def _entry(self, name: str, version: int) -> CartridgeVersion:
        folder = self.directory / f"{name}/{version}"
        try:
            manifest = read_manifest(folder)
            if (manifest.name, manifest.version) != (name, version):
                raise DataError(
                    f"its {MANIFEST} is that of another cartridge or version; drop it, and add "
                    "the file again"
                )
            size = os.stat(f"{folder}/{FILE}").st_size
            if size != manifest.bytes:
                raise DataError(
                    f"{FILE} has {size} bytes, and its manifest says {manifest.bytes}; drop it and "
                    "add it again"
                )
        except (DataError, OSError) as error:
            raise DataError(f"cartridge {name}@{version} is damaged: {error}") from error
        return CartridgeVersion(manifest, folder / FILE)

    def _last(self, name: str) -> int:
        noted = self.directory / name / LAST
        text = "0"
        with suppress(OSError, ValueError):  # none yet, or what is no text
            text = noted.read_text()
        last = int(text) if _NUMBER.fullmatch(text) else 0
        return max([last, *self._numbered(name)])

    def _note_last(self, name: str, version: int) -> None:
        write_atomically(self.directory / name / LAST, str(max(version, self._last(name))))


def _is_in_use(folder: Path) -> bool:
    """Return whether a process holds the lock of `CartridgeStore.incoming`."""
    file = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(file)
    return False


RESULTS = "results.json"  # of a run directory, replaced whole at its end (services.run_directory)
IMPORTED = ".imported"  # in the store: RUN of finished runs that it has, or RUN/CARTRIDGE of one
NO_SOURCE: Mapping[str, Any] = MappingProxyType({})
RUNS = ".runs"  # in the store: RUN<tab>DIRECTORY of each run that cartridges came from


def add_from_run(
    library: CartridgeStore, path: Path, names: Mapping[str, str] | None = None,
    source: Mapping[str, Any] = NO_SOURCE,
) -> list[CartridgeVersion]:  # fmt: skip
    """Add the cartridges of a run: all, or those in `names`, {name in the run: name in the store}.
    `source` is merged into that of each.

    Each gets the terms that the run has of it. The store notes where the run is, and which
    cartridges of a finished one it has, for `add_finished`. Raises DataError or CheckpointError.
    """
    from cartridge_forge.plugins.library.formats import run_checkpoint  # imports torch

    have, run = run_checkpoint.read_all(path, names or None), run_checkpoint.run_of(path)
    terms = read_terms(run / TERMS)
    added = [
        add_cartridge(library, new, have[name], source, terms.get(name, ()))
        for name, new in (names or {name: name for name in have}).items()
    ]
    _note(library.directory / RUNS, f"{run.name}\t{run}")
    if path.resolve() == run and _is_finished(run):
        for name in have:
            _note(library.directory / IMPORTED, f"{run.name}/{name}")
    return added


def noted_run(library: Path, run: str) -> Path | None:
    """Return where the run of an id was when its cartridges were added to the store in `library`;
    None where this was not noted."""
    file = library / RUNS
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    noted = dict(line.split("\t", 1) for line in lines if "\t" in line)
    return Path(noted[run]) if run in noted else None


def _note(file: Path, line: str) -> None:
    """Append a line to a file that does not have it."""
    if not file.is_file() or line not in file.read_text(encoding="utf-8").splitlines():
        with file.open("a", encoding="utf-8") as opened:
            opened.write(f"{line}\n")


def add_cartridge(
    library: CartridgeStore,
    name: str,
    cartridge: CartridgeFile,
    source: Mapping[str, Any],
    passages: Passages = (),
) -> CartridgeVersion:
    """Add a cartridge as the next version of `name`; `source` is merged into its own. Raises
    DataError."""
    with library.incoming() as file:
        forge.write_file(cartridge, file)
        return library.add(name, file, source, passages)


def finished_runs(root: Path) -> list[Path]:
    """Return the finished runs in `root`, a directory of runs or of meshes' run directories, oldest
    first. Running, interrupted and failed runs are left out."""
    folders = {
        p.parent.resolve() for depth in ("*", "*/*") for p in root.glob(f"{depth}/{RESULTS}")
    }
    return sorted((p for p in folders if _is_finished(p)), key=lambda p: (p.name, p))


def add_finished(library: CartridgeStore, root: Path) -> tuple[list[CartridgeVersion], list[str]]:
    """Add the cartridges of all finished runs in `root` that were not added before. Returns the new
    versions, and why runs were skipped: most often they are for another base model. Each run is
    added once, so a version that was dropped since is not added again."""
    from cartridge_forge.plugins.library.formats import run_checkpoint  # imports torch

    added: list[CartridgeVersion] = []
    passed: list[str] = []
    noted = library.directory / IMPORTED
    lines = set(noted.read_text().splitlines()) if noted.is_file() else set()
    for run in finished_runs(root):
        if run.name in lines:
            continue
        try:
            names = [n for n in run_checkpoint.read_all(run) if f"{run.name}/{n}" not in lines]
            if names:
                added += add_from_run(library, run, {name: name for name in names})
        except (DataError, CheckpointError) as error:
            passed.append(f"{run}: {error}")
            continue
        _note(noted, run.name)
    return added, passed


ORIGIN = "from"  # in a cartridge's source: what it was read from
UPDATES = "updates"  # in it: the changes of its text since it was made, oldest first


def lineage(source: Mapping[str, Any]) -> list[str]:
    """Return what a cartridge with this source came from, newest first: the version that was
    updated, `run/checkpoint`, or the path that it was read from."""
    origins: list[str] = []
    at: Mapping[str, Any] | None = source
    while at:
        origins += [f"{one['parent']} updated" for one in reversed(at.get(UPDATES, ()))]
        run = "/".join(str(at[k]) for k in ("run", "checkpoint") if at.get(k))
        if run or at.get(ORIGIN):
            origins.append(run or str(at[ORIGIN]))
        start = at.get("start") or {}
        at = {**start.get("source", {}), ORIGIN: start.get(ORIGIN, "")} if start else None
    return origins


def _is_finished(run: Path) -> bool:
    try:
        results = json.loads((run / RESULTS).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(results, dict) and results.get("status") == "finished"
