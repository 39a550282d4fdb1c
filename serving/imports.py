"""Cartridges of a run, taken from its newest checkpoint into a library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from learning.checkpoint import MANIFEST, list_checkpoints, read_checkpoint
from protocols.errors import DataError
from protocols.spec_loading import load_resolved
from serving.library import Entry, Library, config_hash


def newest_checkpoint(path: Path) -> Path:
    """`path` is a run directory, its `checkpoints`, or one checkpoint. Raises DataError."""
    if (path / MANIFEST).is_file():
        return path
    found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if not found:
        raise DataError(
            f"there is no checkpoint in {path}; give a run directory such as runs/longhealth/latest"
        )
    return found[-1]


def read_cartridges(checkpoint: Path) -> tuple[int, dict[str, Tensor]]:
    """The version of a checkpoint, and the keys and values [L, 2, H_kv, P, D] of its cartridges.

    Raises DataError or CheckpointError.
    """
    read = read_checkpoint(checkpoint)
    try:
        kv = torch.cat([read.tensors["frozen"], read.tensors["trainable"]], dim=4)
        return int(read.facts["version"]), dict(zip(read.facts["names"], kv, strict=True))
    except (KeyError, RuntimeError, ValueError) as error:
        raise DataError(
            f"{checkpoint} is no checkpoint of a run's cartridges ({error!r})"
        ) from error


def add_from_run(
    library: Library, path: Path, names: Mapping[str, str] | None = None
) -> list[Entry]:
    """Add the cartridges of a run: all of them, or those in `names`, {in the run: in the library}.

    Raises DataError or CheckpointError.
    """
    chosen = newest_checkpoint(path.resolve())
    _, have = read_cartridges(chosen)
    facts = read_checkpoint(chosen).facts
    wanted = names or {name: name for name in have}
    missing = sorted(set(wanted) - set(have))
    if missing:
        raise DataError(f"the run has no cartridge {missing[0]}; it has {', '.join(have)}")
    source: dict[str, Any] = {
        "run": chosen.parent.parent.name, "checkpoint": chosen.name,
        "arm": facts.get("arm", ""), "step": facts.get("step", 0),
        "base_hash": facts.get("base_hash", ""),
    }  # fmt: skip
    metadata = _base_of(chosen.parent.parent)
    added = []
    for name, new in wanted.items():
        with library.incoming() as file:
            save_file({"kv": have[name].contiguous()}, file, metadata=metadata)
            added.append(library.add(new, file, {**source, "name": name}))
    return added


def _base_of(run: Path) -> dict[str, str]:
    """The config of the model that the run trained on, where it is at hand."""
    spec = run / "spec.yaml"
    if not spec.is_file():
        return {}
    config = Path(load_resolved(spec).learn.model.path) / "config.json"
    if not config.is_file():
        return {}
    return {"base_config_sha256": config_hash(json.loads(config.read_bytes()))}
