"""Cartridges that come into a library: of a run, or a file of any format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from formats import forge, runs
from formats.value import Cartridge
from serving.library import Entry, Library


def add_from_run(
    library: Library, path: Path, names: Mapping[str, str] | None = None
) -> list[Entry]:
    """Add the cartridges of a run: all of them, or those in `names`, {in the run: in the library}.

    Raises DataError or CheckpointError.
    """
    have = runs.read_all(path, names or None)
    wanted = names or {name: name for name in have}
    return [add_cartridge(library, new, have[name], {}) for name, new in wanted.items()]


def add_cartridge(
    library: Library, name: str, cartridge: Cartridge, source: Mapping[str, Any]
) -> Entry:
    """Add one as the next version of `name`; `source` joins what it says of itself.

    Raises DataError.
    """
    with library.incoming() as file:
        forge.write_file(cartridge, file)
        return library.add(name, file, source)
