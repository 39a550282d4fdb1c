"""Read the cartridges in a run's checkpoints: the float32 master copies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cartridge_forge.learning.checkpoint import (
    CARTRIDGE,
    MANIFEST,
    STACKED,
    SUFFIX,
    last_of_arms,
    list_checkpoints,
    read_checkpoint,
)
from cartridge_forge.plugins.library.formats.base_model import model_name, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import (
    CartridgeFile,
    Provenance,
    source_of,
)
from cartridge_forge.plugins.spec_files.loading import load_resolved
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.records.run_files import read_date

START = "start.json"  # of a run directory: `plugins.library.starts.trained` writes it


def is_run(path: Path) -> bool:
    """Return whether a path is a run's directory, its `checkpoints`, or a checkpoint."""
    return is_checkpoint(path) or bool(_checkpoints(path))


def is_checkpoint(path: Path) -> bool:
    """Return whether a directory has the files of a checkpoint, whole or not."""
    return (path / MANIFEST).is_file() and (
        (path / STACKED).is_file() or any(path.glob(f"{CARTRIDGE}-*{SUFFIX}"))
    )


def chosen_checkpoint(path: Path, arm: str | None = None) -> Path:
    """Return the checkpoint at `path`, a run directory, its `checkpoints` or a checkpoint. Of a
    run: the newest of `arm`, or the newest on policy, as the offline arm, its baseline, is trained
    later. Raises DataError."""
    if is_checkpoint(path) and arm is None:
        return path
    checkpoints = _checkpoints(path)
    if not checkpoints:
        raise DataError(
            f"there is no checkpoint in {path}; give a run directory such as runs/longhealth/latest"
        )
    lasts = last_of_arms(checkpoints[-1].parent)
    if arm is not None and arm not in lasts:
        raise DataError(f"{path} has no checkpoint of arm {arm}; it has {', '.join(lasts)}")
    return lasts.get(arm or "on_policy", checkpoints[-1])


def run_of(path: Path) -> Path:
    """Return the run directory of `path`, as `chosen_checkpoint` takes it. Raises DataError."""
    return chosen_checkpoint(path.resolve()).parent.parent


def read_cartridges(checkpoint: Path) -> tuple[int, dict[str, Tensor]]:
    """Return a checkpoint's version, and its cartridges' kv [L, 2, H_kv, P, D] by name.

    Raises DataError or CheckpointError.
    """
    facts, kv, _ = _whole(checkpoint)
    return int(facts["version"]), kv


def read_all(path: Path, names: Collection[str] | None = None) -> dict[str, CartridgeFile]:
    """Return the cartridges of a run's newest on-policy checkpoint by name, or those in `names`.

    Raises DataError or CheckpointError.
    """
    checkpoint = chosen_checkpoint(path.resolve())
    facts, kv, frozen = _whole(checkpoint)
    run = checkpoint.parent.parent
    source: dict[str, Any] = {
        "run": run.name, "checkpoint": checkpoint.name, "version": facts["version"],
        "arm": facts.get("arm", ""), "step": facts.get("step", 0),
    }  # fmt: skip
    source |= source_of(read_date(run))
    if facts.get("last"):
        source["metrics"] = {k: facts["last"][k] for k in ("kl", "tokens") if k in facts["last"]}
    missing = sorted(set(names or ()) - set(facts["names"]))
    if missing:
        have = ", ".join(facts["names"])
        raise DataError(f"the run has no cartridge {missing[0]}; it has {have}")
    made_for, data = _of_spec(run, facts.get("base_hash", ""))
    started = read_start_record(run / START)
    return {
        name: CartridgeFile(part, frozen, made_for).with_source(
            {**source, **data, "name": name} | ({"start": started[name]} if name in started else {})
        )
        for name, part in kv.items()
        if names is None or name in names
    }


def read_start_record(path: Path) -> dict[str, Any]:
    """Return how a run's cartridges started, by name; {} where none started from a trained one.
    Raises DataError for a damaged record."""
    try:
        record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); restore it from a copy") from error
    return record


def read(path: Path, name: str | None) -> CartridgeFile:
    """Return a run's cartridge `name`, or its only one. Raises DataError or CheckpointError."""
    have = read_all(path, None if name is None else [name])
    if len(have) > 1:
        raise DataError(f"{path} has {len(have)} cartridges: {', '.join(have)}; choose with --name")
    return next(iter(have.values()))


def _checkpoints(path: Path) -> list[Path]:
    return list_checkpoints(path / "checkpoints") or list_checkpoints(path)


def _whole(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Tensor], int]:
    """Return the facts of a checkpoint, its cartridges [L, 2, H_kv, P, D] by name, and their number
    of frozen tokens."""
    read = read_checkpoint(checkpoint)
    try:
        parts = {name: read.cartridge(name) for name in read.facts["names"]}
        kv = {n: torch.cat([part["frozen"], part["trainable"]], dim=3) for n, part in parts.items()}
        (frozen,) = {part["frozen"].shape[3] for part in parts.values()}
        int(read.facts["version"])
        return read.facts, kv, frozen
    except (KeyError, RuntimeError, ValueError, IndexError) as error:
        raise DataError(
            f"{checkpoint} is no checkpoint of a run's cartridges ({error!r})"
        ) from error


def _of_spec(run: Path, weights: str) -> tuple[Provenance, dict[str, str]]:
    """Return the model's facts from the run's spec, if any, and the hash of its data section."""
    spec = run / "spec.yaml"
    if not spec.is_file():
        return Provenance(weights_sha256=weights), {}
    learn = load_resolved(spec).learn
    data = json.dumps(learn.model_dump(mode="json", include={"data"}).get("data"), sort_keys=True)
    name, dtype = model_name(learn.model.path), learn.model.dtype
    provenance = Provenance(base=name, weights_sha256=weights, weights_dtype=dtype)
    if (Path(learn.model.path) / "config.json").is_file():
        base = read_base(Path(learn.model.path))
        provenance = replace(provenance, config_sha256=base.config_sha256, rope=base.rope)
    return provenance, {"data_spec_sha256": hashlib.sha256(data.encode()).hexdigest()}
