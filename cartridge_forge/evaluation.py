"""Hold what `Forge.evaluate` measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cartridge_forge.display import page


@dataclass(frozen=True)
class ComparedArms:
    """Hold the arms of `forge eval`: `rows` and `pairs` are those of eval.json
    (docs/reference/evaluation.md), `directory` has it with its tables and plots."""

    rows: tuple[Mapping[str, Any], ...]
    pairs: tuple[Mapping[str, Any], ...] = field(repr=False)
    directory: Path

    @property
    def accuracy(self) -> dict[str, float | None]:
        """Return the accuracy of each arm by its name; None where it was not measured."""
        return {row["arm"]: row["accuracy"] for row in self.rows}

    def _repr_html_(self) -> str:
        cells = [(arm, "-" if x is None else f"{x:.1%}") for arm, x in self.accuracy.items()]
        return page("evaluation", ("arm", "accuracy"), cells)
