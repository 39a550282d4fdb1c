"""Keep base models by name: `forge models add|check|list|show`."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path

from cartridge_forge.forge_run.commands import note
from cartridge_forge.forge_run.model_check import check_again
from cartridge_forge.learning.model.verdict import ModelVerdict
from cartridge_forge.plugins.cluster.manifests.sizing import model_shape
from cartridge_forge.plugins.documents.readers.html_text import html_text
from cartridge_forge.plugins.library.base_models.kept import (
    Dtype,
    add_model,
    kept_model,
    kept_models,
    terms_page,
)
from cartridge_forge.plugins.library.models.verdicts import WAYS
from cartridge_forge.plugins.statistics.formatting import TableSection, facts, render
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import model_names, models_folder, named_model
from cartridge_forge.protocols.spec.model import ModelSpec

POLL_SECONDS = 2.0  # between two looks for a model that another process adds


def add(
    *, source: str, name: str | None, dtype: Dtype, if_missing: bool, accept_license: bool
) -> int:
    """Keep a model and say how to name it; print the terms that are to be accepted first. Raises
    DataError."""
    if if_missing and name is not None and name in model_names():
        print(f"{name} is kept already: {models_folder() / name}")
        return 0
    if not accept_license and (page := terms_page(source)) is not None:
        print(html_text(page))
    else:
        note(f"adding {source}: read, converted and hashed, a minute or two")
    model = add_model(source, name, dtype, accept_license)
    print(f"{model.name}: {model.bytes:,} bytes of weights, {model.licence}, {model.sha256[:12]}")
    print(f"name it anywhere as model.path: {model.name}")
    return 0


def check(*, name: str) -> list[TableSection]:
    """Check a model now, keep the verdict and return it, way by way. Raises DataError for a model
    that is not computed right, once its differences are printed."""
    path = name if Path(name).is_dir() else str(named_model(name) or name)
    verdict = check_again(path)
    if not verdict.refusal:
        return _told(verdict)
    if verdict.nats:
        sys.stdout.write(render(_told(verdict), terminal=sys.stdout.isatty()))
    raise DataError(verdict.refusal)


def _told(verdict: ModelVerdict) -> list[TableSection]:
    rows = [
        (
            WAYS[name],
            f"{d:.1e}",
            f"{verdict.bound:.1g}",
            "right" if d <= verdict.bound else "wrong",
        )
        for name, d in verdict.nats.items()
    ]
    moved = verdict.unmoved or "keys can be moved"
    return [
        TableSection(
            f"{verdict.model}: log-probabilities against its own forward pass",
            ("a short text", "nats off", "rounding", ""), tuple(rows),
        ),
        facts("check", [
            ("family", verdict.family), ("layers", f"{verdict.layers} of {verdict.of_layers}"),
            ("composed cartridges", moved), ("took", f"{verdict.seconds:.2f} s"),
        ]),
    ]  # fmt: skip


def list_models() -> list[TableSection]:
    """Return a table of all kept models."""
    rows = tuple(
        (
            model.name,
            f"{model.bytes:,}",
            model.sha256[:12],
            model.licence,
            model.source,
            model.added,
        )
        for model in kept_models()
    )
    heads = ("model", "bytes", "sha256", "licence", "source", "added")
    return [TableSection(str(models_folder()), heads, rows)]


def show(*, name: str, wait: float) -> list[TableSection]:
    """Return a kept model's facts and shape, once it is kept, within `wait` seconds. Raises
    DataError for an unknown name."""
    end = time.monotonic() + wait
    while name not in model_names() and time.monotonic() < end:
        time.sleep(min(POLL_SECONDS, wait))
    model, folder = kept_model(name), models_folder() / name
    shape = model_shape(ModelSpec(path=str(folder)))
    fields = {**asdict(model), "directory": folder, **(shape.model_dump() if shape else {})}
    files = sorted(Path(folder).iterdir())
    return [
        facts(name, [(key, str(value)) for key, value in fields.items()]),
        facts("files", [(file.name, f"{file.stat().st_size:,} bytes") for file in files]),
    ]
