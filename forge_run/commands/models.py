"""Keep base models by name: `forge models add|list|show`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from forge_run.commands import note
from forge_run.formatting import TableSection, facts
from protocols.home import models_folder
from protocols.spec.model_shape import model_shape
from protocols.spec.sections import ModelSpec
from registry.base_models.kept import Dtype, add_model, kept_model, kept_models


def add(*, source: str, name: str | None, dtype: Dtype) -> int:
    """Keep a model and say how to name it. Raises DataError."""
    note(f"adding {source}: read, converted and hashed, a minute or two")
    kept = add_model(source, name, dtype)
    print(f"{kept.name}: {kept.bytes:,} bytes of weights, {kept.licence}, {kept.sha256[:12]}")
    print(f"name it anywhere as model.path: {kept.name}")
    return 0


def list_models() -> list[TableSection]:
    """Return a table of all kept models."""
    rows = tuple(
        (kept.name, f"{kept.bytes:,}", kept.sha256[:12], kept.licence, kept.source, kept.added)
        for kept in kept_models()
    )
    heads = ("model", "bytes", "sha256", "licence", "source", "added")
    return [TableSection(str(models_folder()), heads, rows)]


def show(*, name: str) -> list[TableSection]:
    """Return a kept model's facts and shape. Raises DataError for an unknown name."""
    kept, folder = kept_model(name), models_folder() / name
    shape = model_shape(ModelSpec(path=str(folder)))
    held = {**asdict(kept), "directory": folder, **(shape.model_dump() if shape else {})}
    files = sorted(Path(folder).iterdir())
    return [
        facts(name, [(key, str(value)) for key, value in held.items()]),
        facts("files", [(file.name, f"{file.stat().st_size:,} bytes") for file in files]),
    ]
