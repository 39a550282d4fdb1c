"""Cartridges of runs, taken from their newest checkpoints into a library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from learning.checkpoint import MANIFEST, list_checkpoints, read_checkpoint
from protocols.errors import CheckpointError, DataError
from protocols.spec_loading import load_resolved
from serving.library import Entry, Library, config_hash

RESULTS = "results.json"  # of a run directory, replaced whole at its end (services.rundir)
IMPORTED = ".imported"  # in the library: ids of the runs that `add_finished` added


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


def finished_runs(root: Path) -> list[Path]:
    """The runs in `root`, which holds runs, or the folders of meshes, that came to their end: the
    oldest first. A run that still goes on, was interrupted or failed is not among them."""
    found = {p.parent.resolve() for depth in ("*", "*/*") for p in root.glob(f"{depth}/{RESULTS}")}
    return sorted((p for p in found if _is_finished(p)), key=lambda p: (p.name, p))


def add_finished(library: Library, root: Path) -> tuple[list[Entry], list[str]]:
    """Add the cartridges of all finished runs in `root` whose turn has not come yet. Returns the
    new entries, and why runs were passed by: those for another base model, most often. Each run
    is added once; what was dropped of it since does not come back."""
    added: list[Entry] = []
    passed: list[str] = []
    noted = library.directory / IMPORTED
    done = set(noted.read_text().splitlines()) if noted.is_file() else set()
    for run in finished_runs(root):
        if run.name in done:
            continue
        try:
            added += add_from_run(library, run)
        except (DataError, CheckpointError) as error:
            passed.append(f"{run}: {error}")
            continue
        with noted.open("a") as file:
            file.write(f"{run.name}\n")
    return added, passed


def _is_finished(run: Path) -> bool:
    try:
        found = json.loads((run / RESULTS).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and found.get("status") == "finished"


def _base_of(run: Path) -> dict[str, str]:
    """The config of the model that the run trained on, where it is at hand."""
    spec = run / "spec.yaml"
    if not spec.is_file():
        return {}
    config = Path(load_resolved(spec).learn.model.path) / "config.json"
    if not config.is_file():
        return {}
    return {"base_config_sha256": config_hash(json.loads(config.read_bytes()))}
