"""Write checkpoints atomically: one safetensors file and one JSON manifest, both checksummed.

    checkpoints/version-000040/state.safetensors
    checkpoints/version-000040/manifest.json     {"facts": ..., "sha256": ..., "schema": 2}

The directory is filled under a temporary name, flushed to disk and renamed, so a checkpoint is
either whole or absent. No pickle is written or read.

The trainer's last state is written after every step as one safetensors file, with the facts in its
header. It survives the trainer's process but not the machine: it is renamed into place without a
flush. Its checksum is a CRC, whose cost is negligible beside the writing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from protocols.errors import CheckpointError
from protocols.files import flush, sha256_of

SCHEMA = 2
STATE, MANIFEST = "state.safetensors", "manifest.json"


@dataclass(frozen=True)
class Checkpoint:
    """Hold the state of a trainer: `facts` are JSON-able, `tensors` are keyed by name."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def write_checkpoint(directory: Path, name: str, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `directory/name` atomically and return its path. Delete all checkpoints but the newest
    `keep` and the last of every arm, which holds that arm's result.

    A whole checkpoint of this name has the same state and is left unchanged. A damaged one (the run
    was resumed from the one before it) is replaced.
    """
    final = directory / name
    if final.exists() and _is_whole(final):
        return final
    partial = directory / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_on_host(checkpoint.tensors), partial / STATE)
    manifest = {"schema": SCHEMA, "sha256": sha256_of(partial / STATE), "facts": checkpoint.facts}
    manifest["facts_sha256"] = _facts_sha256(checkpoint.facts)
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1, sort_keys=True))
    for path in (partial / STATE, partial / MANIFEST, partial):
        flush(path)
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    flush(directory)
    lasts = set(last_of_arms(directory).values())
    for old in list_checkpoints(directory)[:-keep]:
        if old not in lasts:
            shutil.rmtree(old)
    return final


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints, oldest version first, without partial ones."""
    return sorted(p for p in directory.glob("version-*") if p.is_dir())


def last_of_arms(directory: Path) -> dict[str, Path]:
    """Return the newest checkpoint of each arm by the manifests alone. Checkpoints that cannot be
    read or have no arm are skipped."""
    found = {}
    for path in list_checkpoints(directory):
        try:
            found[str(json.loads((path / MANIFEST).read_text())["facts"]["arm"])] = path
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def read_checkpoint(path: Path) -> Checkpoint:
    """Read and verify one checkpoint. Raises CheckpointError that names it and the fault."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        stated, facts = manifest["sha256"], manifest["facts"]
        facts_stated, schema = manifest["facts_sha256"], manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"checkpoint {path} has no readable manifest ({error}){_instead(path)}"
        ) from error
    if schema != SCHEMA:
        raise CheckpointError(
            f"checkpoint {path} has schema {schema}, this version reads {SCHEMA}; use the "
            "cartridge-forge version that wrote it"
        )
    if not (path / STATE).is_file() or sha256_of(path / STATE) != stated:
        raise CheckpointError(
            f"checkpoint {path} is damaged: {STATE} does not match its checksum{_instead(path)}"
        )
    if _facts_sha256(facts) != facts_stated:
        raise CheckpointError(
            f"checkpoint {path} was edited: its facts do not match their checksum{_instead(path)}"
        )
    try:
        tensors = load_file(path / STATE)
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {error}") from error
    return Checkpoint(facts, tensors)


def write_state(path: Path, state: Checkpoint) -> None:
    """Write the state to `path` atomically, replacing the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    tensors = _on_host(state.tensors)
    facts = json.dumps(state.facts)
    save_file(tensors, partial, metadata={"facts": facts, "crc32": _crc32(facts, tensors)})
    partial.replace(path)


def read_state(path: Path) -> Checkpoint:
    """Return the state that `write_state` wrote. Raises CheckpointError for a damaged or missing
    file."""
    try:
        with safe_open(path, framework="pt") as file:
            facts, stated = file.metadata()["facts"], file.metadata()["crc32"]
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no dict)
        if _crc32(facts, tensors) != stated:
            raise ValueError("it does not match its checksum")
        return Checkpoint(json.loads(facts), tensors)
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"the trainer's last state {path} cannot be read: {error}; end the run and resume it "
            "from its last checkpoint"
        ) from error


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _is_whole(path: Path) -> bool:
    try:
        read_checkpoint(path)
    except CheckpointError:
        return False
    return True


def _instead(path: Path) -> str:
    others = [p for p in list_checkpoints(path.parent) if p.name < path.name]
    return f"; the one before it is {others[-1]}" if others else "; there is none before it"


def _facts_sha256(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _crc32(facts: str, tensors: Mapping[str, Tensor]) -> str:
    crc = zlib.crc32(facts.encode())
    for name in sorted(tensors):
        crc = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, crc)
    return f"{crc:08x}"
