"""Write a trainer's state to files: checkpoints to resume from, and the last state of a live run.

A checkpoint is a safetensors file of each cartridge and one JSON manifest, all checksummed, written
atomically.

    checkpoints/version-000040/cartridge-0000-000040.safetensors
    checkpoints/version-000040/cartridge-0001-000012.safetensors   unchanged since version 12
    checkpoints/version-000040/manifest.json     {"facts": ..., "files": {...}, "schema": 3}

A file that the checkpoint before it has already is linked, not written again, once its checksum has
been verified; where the file system has no hard links it is copied. The directory is filled under a
temporary name, flushed to disk and renamed, so a checkpoint is either whole or absent. No pickle is
written or read.

Ranks that hold cartridges of their own write the files of these into the same directory, and rank 0
the manifest: a checkpoint does not tell by how many it was written.

Checkpoints of schema 2 hold all cartridges stacked in one file; they are still read.

The last state is kept so that the replacement of a lost trainer continues from it.

    last-state/cartridge-0000-000041-9c1d02aa.safetensors   numbers and moments since version 41
    last-state/published-0000-000040-51f0be17.safetensors   the copy published with version 40
    last-state/manifest.json                                {"facts": ..., "files": {...}, ...}

A step writes the parts that it changed and then the manifest, which is renamed into place: it names
every file of the state, so a crash at any point leaves the state before it or the new one, whole.
Files that the manifest does not name are deleted after that. A file's name ends with the CRC of its
tensors: another content never replaces a file that the manifest names. Ranks that hold cartridges
of their own write the parts of these, and rank 0 the manifest.

It survives the trainer's process but not the machine: nothing is flushed to disk. A CRC costs
nothing beside the writing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cartridge_forge.learning.ranks import ALONE, ProcessGroup, map_large, to_host
from cartridge_forge.protocols.errors import CheckpointError, DamagedError
from cartridge_forge.protocols.files import flush, sha256_of, with_room

SCHEMA = 3
STACKED, STACKED_SCHEMA = "state.safetensors", 2
MANIFEST, SUFFIX = "manifest.json", ".safetensors"
CARTRIDGE = "cartridge"  # begins the name of a part with a cartridge's training state


@dataclass(frozen=True)
class Checkpoint:
    """Hold the state of a trainer.

    facts  JSON-able; "names" are those of the cartridges, "cartridges" has the facts of each:
           {"patient_01": {"since": 12, "step": 4, "steps": 60, "warmup_steps": 5}}
    parts  tensors by name, by part (`part_name`); a part never changes under its name
    path   the checkpoint's directory, of one that was read
    """

    facts: dict[str, Any]
    parts: Mapping[str, Mapping[str, Tensor]]
    path: Path | None = None

    def cartridge(self, name: str) -> Mapping[str, Tensor]:
        """Return a cartridge's tensors: `frozen` [L, 2, H_kv, F, D], `trainable`
        [L, 2, H_kv, P-F, D], and of its shape Adam's moments and further averages."""
        since = self.facts["cartridges"][name]["since"]
        return self.parts[part_name(CARTRIDGE, self._index[name], since)]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: i for i, name in enumerate(self.facts["names"])}


def part_name(kind: str, index: int, since: int) -> str:
    """Return the name of what is kept of the cartridge with this index, whose numbers are unchanged
    since a version."""
    return f"{kind}-{index:04d}-{since:06d}"


def part_index(part: str) -> int:
    """Return the index of the cartridge that a part is of."""
    return int(part.split("-")[1])


def united(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the facts of a whole checkpoint from those of its writers, each of which has other
    cartridges. "published" lists by version what each of "names" has had since when."""
    first, *rest_of = parts
    if not rest_of:
        return first
    published = {}
    for version in first["published"]:
        since = {
            name: at
            for one in parts
            for name, at in zip(one["cartridges"], one["published"][version], strict=True)
        }
        published[version] = [since[name] for name in first["names"]]
    cartridges = {name: facts for one in parts for name, facts in one["cartridges"].items()}
    return {**first, "cartridges": dict(sorted(cartridges.items())), "published": published}


def write_checkpoint(
    directory: Path,
    name: str,
    checkpoint: Checkpoint,
    keep: int,
    previous: Path | None = None,
    writers: ProcessGroup = ALONE,
) -> Path:
    """Write `directory/name` atomically and return its path. Delete all checkpoints but the newest
    `keep` and the last of every arm, which holds that arm's result.

    `previous` is a checkpoint from which the trainer went on to this one: parts of the same name
    are taken from it. A whole checkpoint of this name has the same state and is left unchanged. A
    damaged one (the run was resumed from the one before it) is replaced.

    All `writers` call it, each with its own cartridges; it returns when the checkpoint is whole.
    """
    final = directory / name
    is_whole = writers.leads and final.exists() and _is_whole(final)
    if writers.gather({"whole": is_whole})[0]["whole"]:
        return final
    partial = directory / f".{name}.partial"
    if writers.leads:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()  # no parents: nobody makes a run's directory again that was removed
    writers.gather({})
    try:
        files = with_room(partial, lambda: _fill(partial, checkpoint, previous))
        reports = writers.gather({"files": files, "facts": checkpoint.facts})
        if writers.leads:
            with_room(partial, lambda: _close(partial, reports))
            _publish(partial, final, keep)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    writers.gather({})
    return final


def _publish(partial: Path, final: Path, keep: int) -> None:
    """Give a checkpoint its name, and delete those that need not be kept."""
    directory = final.parent
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    flush(directory)
    lasts = set(last_of_arms(directory).values())
    for old in list_checkpoints(directory)[:-keep]:
        if old not in lasts:
            shutil.rmtree(old)


def _fill(partial: Path, checkpoint: Checkpoint, previous: Path | None) -> dict[str, str]:
    """Write the files of a checkpoint's parts in the directory `partial`; return their checksums by
    part."""
    checksums = {} if previous is None else _files(previous)

    def fill(part: str) -> str:
        path = partial / f"{part}{SUFFIX}"
        path.unlink(missing_ok=True)  # of a try that met a full disk
        if previous is not None and _linked(previous / path.name, path, checksums.get(part)):
            return checksums[part]
        save_tensors({n: to_host(x) for n, x in checkpoint.parts[part].items()}, path)
        return sha256_of(path)

    digests = map_large(fill, checkpoint.parts, parts_bytes(checkpoint.parts))
    return dict(zip(checkpoint.parts, digests, strict=True))


def _close(partial: Path, reports: Sequence[dict[str, Any]]) -> None:
    """Write the manifest of what all writers told, and flush every file."""
    facts = united([one["facts"] for one in reports])
    files = {part: digest for one in reports for part, digest in one["files"].items()}
    manifest = {"schema": SCHEMA, "files": files, "facts": facts}
    manifest["facts_sha256"] = _facts_sha256(facts)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    for path in (*partial.iterdir(), partial):
        flush(path)


def save_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file. Raises OSError for an error of the system, whose number safetensors
    puts into a text."""
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(path)) from error


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints, oldest version first, without partial ones."""
    return sorted(p for p in directory.glob("version-*") if p.is_dir())


def last_of_arms(directory: Path) -> dict[str, Path]:
    """Return the newest checkpoint of each arm by the manifests alone. Checkpoints that cannot be
    read or have no arm are skipped."""
    paths = {}
    for path in list_checkpoints(directory):
        try:
            paths[str(json.loads((path / MANIFEST).read_text())["facts"]["arm"])] = path
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return paths


def newest_whole(
    directory: Path, usable: Callable[[dict[str, Any]], bool]
) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is not damaged and whose run state is `usable`, None where
    there is none, and why each newer one was not. Those are set aside under the name
    `damaged-version-NNNNNN`. Raises CheckpointError for one that only another version can read."""
    passed: list[str] = []
    for path in reversed(list_checkpoints(directory)):
        why = f"checkpoint {path} is later than the damage in the run's files"
        try:
            _, facts, _ = _verified(path)
            if usable(facts["position"]):
                return path, passed
        except DamagedError as damage:
            why = str(damage)
        aside = path.with_name(f"damaged-{path.name}")
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
        passed.append(f"{why}; set aside as {aside.name}")
    return None, passed


def read_checkpoint(path: Path, wanted: Callable[[str], bool] = lambda part: True) -> Checkpoint:
    """Read and verify one checkpoint, and return it with the parts that are `wanted`. Raises
    CheckpointError that names it and the fault."""
    schema, facts, files = _verified(path)
    try:
        stacked = schema == STACKED_SCHEMA
        read = [part for part in files if stacked or wanted(part)]
        parts = {part: load_file(path / f"{part}{SUFFIX}") for part in read}
    except SafetensorError as error:
        raise DamagedError(f"checkpoint {path} cannot be read: {error}") from error
    if schema == SCHEMA:
        return Checkpoint(facts, parts, path)
    try:
        return _unstacked(facts, *parts.values())
    except (KeyError, IndexError) as error:
        raise CheckpointError(
            f"checkpoint {path} is no checkpoint of a trainer ({error!r})"
        ) from error


def _verified(path: Path) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Return schema, facts, and checksums by part, once they match the files. Raises DamagedError,
    or CheckpointError for another version's schema."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        facts, facts_stated = manifest["facts"], manifest["facts_sha256"]
        schema = manifest["schema"]
        if schema == STACKED_SCHEMA:
            files = {STACKED.removesuffix(SUFFIX): manifest["sha256"]}
        else:
            files = dict(manifest["files"]) if schema == SCHEMA else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            f"checkpoint {path} has no readable manifest ({error}){_instead(path)}"
        ) from error
    if schema not in (STACKED_SCHEMA, SCHEMA):
        raise CheckpointError(
            f"checkpoint {path} has schema {schema}, this version reads {STACKED_SCHEMA} and "
            f"{SCHEMA}; use the cartridge-forge version that wrote it"
        )
    for part, stated in files.items():
        file = path / f"{part}{SUFFIX}"
        if not file.is_file() or sha256_of(file) != stated:
            raise DamagedError(
                f"checkpoint {path} is damaged: {file.name} does not match its checksum"
                f"{_instead(path)}"
            )
    if _facts_sha256(facts) != facts_stated:
        raise DamagedError(
            f"checkpoint {path} was edited: its facts do not match their checksum{_instead(path)}"
        )
    return schema, facts, files


def parts_bytes(parts: Mapping[str, Mapping[str, Tensor]]) -> int:
    """Return the bytes of all tensors of a checkpoint's parts."""
    return sum(tensor.nbytes for tensors in parts.values() for tensor in tensors.values())


def _unstacked(facts: dict[str, Any], stacked: Mapping[str, Tensor]) -> Checkpoint:
    """Return a checkpoint whose cartridges were trained and counted together, each with its share
    of the stacked tensors [C, ...] and the common counts."""
    common = {
        "since": facts["version"], "step": facts.get("step", 0), "steps": facts.get("steps", 1),
        "warmup_steps": facts.get("warmup_steps", 0), "balance": facts.get("balance", {}),
    }  # fmt: skip
    parts = {
        part_name(CARTRIDGE, i, facts["version"]): {
            name: tensor[i].clone() if tensor.ndim else tensor for name, tensor in stacked.items()
        }
        for i in range(len(facts["names"]))
    }
    cartridges = {name: dict(common) for name in facts["names"]}
    return Checkpoint({**facts, "cartridges": cartridges}, parts)


def _files(checkpoint: Path) -> dict[str, str]:
    """Return the checksums of a checkpoint's parts; none where it cannot be read."""
    try:
        return dict(json.loads((checkpoint / MANIFEST).read_text())["files"])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _linked(source: Path, path: Path, stated: str | None) -> bool:
    """Link a file to `path`, or copy it; return False, with no file there, where it does not match
    the checksum `stated`."""
    if stated is None or not source.is_file() or sha256_of(source) != stated:
        return False
    try:
        os.link(source, path)
    except OSError:  # no hard links here
        shutil.copyfile(source, path)
    return True


def _is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _instead(path: Path) -> str:
    older = [p for p in list_checkpoints(path.parent) if p.name < path.name]
    return f"; the one before it is {older[-1]}" if older else "; there is none before it"


def _facts_sha256(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


PARTIAL = ".partial"


class LastState:
    """Write and read the state in the directory `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, str] = {}  # by part: its file, of the state written or read last
        self._listed: set[str] | None = None  # by rank 0: the files of the state written last

    def write(self, state: Checkpoint, writers: ProcessGroup = ALONE) -> None:
        """Replace the state on disk. Parts that the state written or read before has are not
        written again. All `writers` call it, each with its own cartridges."""
        listed, self._listed = self._listed, None  # unknown until this state stands
        own_files = with_room(self._path / MANIFEST, lambda: self._fill(state))
        reports = writers.gather({"files": own_files, "facts": state.facts})
        if writers.leads:
            facts = united([one["facts"] for one in reports])
            files = {part: file for one in reports for part, file in one["files"].items()}
            with_room(self._path / MANIFEST, lambda: self._close(facts, files, listed))
        writers.gather({})  # nobody writes the next state while rank 0 deletes files
        self._files = own_files

    def _fill(self, state: Checkpoint) -> dict[str, str]:
        """Write the parts; return the names of their files."""
        self._path.mkdir(exist_ok=True)  # no parents: a removed run's directory is not made again
        new = {part: x for part, x in state.parts.items() if part not in self._files}
        wrote = map_large(self._write, new.items(), parts_bytes(new))
        files = self._files | dict(zip(new, wrote, strict=True))
        return {part: files[part] for part in state.parts}

    def _close(
        self, facts: dict[str, Any], files: Mapping[str, str], listed: Collection[str] | None
    ) -> None:
        """Write the manifest and delete the files that it does not name, of those `listed` by the
        one before it, or of all."""
        state = json.dumps({"facts": facts, "files": files})
        manifest = json.dumps({"crc32": f"{zlib.crc32(state.encode()):08x}", "state": state})
        partial = self._path / f"{MANIFEST}{PARTIAL}"
        partial.write_text(manifest)
        partial.replace(self._path / MANIFEST)
        names = {*files.values(), MANIFEST}
        for name in listed or [file.name for file in self._path.iterdir()]:
            if name not in names:
                (self._path / name).unlink()
        self._listed = names

    def forget(self) -> None:
        """Write every part of the next state: its line is another than that of the one on disk."""
        self._files = {}

    def read(self, wanted: Callable[[str], bool] = lambda part: True) -> Checkpoint | None:
        """Return the state on disk, of its parts those that are `wanted`; None where none was
        written. Raises CheckpointError for a damaged one, and for one of an earlier version."""
        old = self._path.with_name(self._path.name + SUFFIX)
        if old.exists():
            raise CheckpointError(
                f"the trainer's last state {old} was written by an earlier version of "
                "cartridge-forge; end the run and resume it from its last checkpoint"
            )
        if not (self._path / MANIFEST).exists():
            return None
        try:
            manifest = json.loads((self._path / MANIFEST).read_text())
            if f"{zlib.crc32(manifest['state'].encode()):08x}" != manifest["crc32"]:
                raise ValueError(f"{MANIFEST} does not match its checksum")
            state = json.loads(manifest["state"])
            files = {part: file for part, file in state["files"].items() if wanted(part)}
            parts = {part: self._read(part, file) for part, file in files.items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"the trainer's last state {self._path} cannot be read: {error}; end the run and "
                "resume it from its last checkpoint"
            ) from error
        self._files = files
        return Checkpoint(state["facts"], parts)

    def _write(self, item: tuple[str, Mapping[str, Tensor]]) -> str:
        """Write a part and its tensors; return the name of its file."""
        part, tensors = item[0], {name: to_host(tensor) for name, tensor in item[1].items()}
        name = _file_name(part, tensors)
        partial = self._path / f"{name}{PARTIAL}"
        save_tensors(tensors, partial)
        partial.replace(self._path / name)
        return name

    def _read(self, part: str, file: str) -> dict[str, Tensor]:
        tensors = load_file(self._path / file)
        if _file_name(part, tensors) != file:
            raise ValueError(f"{file} does not match its checksum")
        return tensors


def last_version(path: Path) -> int | None:
    """Return the version of the state in the directory `path`, by its manifest alone; None for none
    that can be read."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        return int(json.loads(manifest["state"])["facts"]["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _file_name(part: str, tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        crc = zlib.crc32(name.encode(), crc)
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{part}-{crc:08x}{SUFFIX}"
