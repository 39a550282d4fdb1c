"""Report from which trained cartridges a run started, and what these came from."""

from __future__ import annotations

from pathlib import Path

from forge_run.report.template import Block


def start(file: Path) -> list[Block]:
    """Return the ways in which the cartridges of a start.json begin, and the chain of runs and
    files behind each; nothing for a run without trained cartridges. Raises DataError for a damaged
    file."""
    if not file.is_file():
        return []
    # These import torch.
    from registry.formats.run_checkpoint import read_start_record
    from registry.starting import lineage, told

    record = read_start_record(file)
    chains: dict[str, list[str]] = {}
    for name, one in record.items():
        if "source" in one:
            chains.setdefault(" after ".join(lineage({"start": one})), []).append(name)
    lines = [f"{', '.join(names)} came from {chain}" for chain, names in chains.items()]
    return [("list", [*told(record), *lines])] if record else []
