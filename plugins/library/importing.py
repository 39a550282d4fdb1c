"""Import cartridges into a cartridge store, from runs or from files of any format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.formats import forge, run_checkpoint
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.store import CartridgeStore, CartridgeVersion
from cartridge_forge.plugins.library.terms import Passages, read_terms
from cartridge_forge.protocols.errors import CheckpointError, DataError
from cartridge_forge.protocols.records.run_files import TERMS

RESULTS = "results.json"  # of a run directory, replaced whole at its end (services.run_directory)
IMPORTED = ".imported"  # in the store: ids of the runs that `add_finished` added


def add_from_run(
    library: CartridgeStore, path: Path, names: Mapping[str, str] | None = None
) -> list[CartridgeVersion]:
    """Add the cartridges of a run: all, or those in `names`, {name in the run: name in the store}.

    Each gets the terms that the run has of it. Raises DataError or CheckpointError.
    """
    have = run_checkpoint.read_all(path, names or None)
    terms = read_terms(run_checkpoint.run_of(path) / TERMS)
    return [
        add_cartridge(library, new, have[name], {}, terms.get(name, ()))
        for name, new in (names or {name: name for name in have}).items()
    ]


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
    added: list[CartridgeVersion] = []
    passed: list[str] = []
    noted = library.directory / IMPORTED
    run_names = set(noted.read_text().splitlines()) if noted.is_file() else set()
    for run in finished_runs(root):
        if run.name in run_names:
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
        results = json.loads((run / RESULTS).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(results, dict) and results.get("status") == "finished"
