"""Archives of studies made by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cartridge_forge.protocols.files import json_lines
from studies import archive
from studies.archive import KeptRun


@dataclass
class HandmadeArchive:
    """Collect runs made by hand, and pack them as the archive of `study` below archive.HOME."""

    study: str
    reference: str | None = None
    runs: list[KeptRun] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)

    def add(
        self, sweep: str, seed: int, arms: Mapping[str, str],
        rows: Mapping[str, Iterable[Mapping[str, Any]]], **documents: Any,
    ) -> None:  # fmt: skip
        """Add a run: `rows` and `documents` by the names of their files."""
        name = f"{sweep}/{len(self.runs)}"
        self.runs.append(KeptRun(name, sweep, seed, arms, "by hand", "", self.reference))
        for file, file_rows in rows.items():
            self.files[f"{name}/{file}.jsonl"] = json_lines(file_rows).encode()
        for file, document in documents.items():
            suffix = "yaml" if file == "spec" else "json"
            self.files[f"{name}/{file}.{suffix}"] = json.dumps(document).encode()

    def pack(self) -> None:
        """Write the archive."""
        archive.pack(self.study, self.files | {archive.RUNS: archive.listing(self.runs)})
