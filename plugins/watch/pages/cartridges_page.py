"""Answer what the page of cartridges shows: sizes, norms by layer, versions and their difference.

Torch is imported with the first request: who only watches a run does not pay for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.watch.pages.run_view import RunView
from cartridge_forge.protocols.errors import DataError


def cartridges(view: RunView, checkpoint: str) -> dict[str, Any]:
    """Return a run's checkpoints, and the cartridges of one of them, "" for `own`: the newest on
    policy. Raises DataError or CheckpointError."""
    from cartridge_forge.learning.checkpoint import list_checkpoints
    from cartridge_forge.plugins.library.formats.run_checkpoint import chosen_checkpoint

    names = [path.name for path in list_checkpoints(view.run.checkpoints)]
    page: dict[str, Any] = {"checkpoints": names, "cartridges": [], "document_tokens": None}
    if not names:
        return page
    newest = chosen_checkpoint(view.run.path)
    chosen = _path(view, checkpoint) if checkpoint else newest
    results = view.run.read_results() or {}
    trained = view.spec.learn.model.dtype if view.spec is not None else "float32"
    return page | {
        "shown": chosen.name,
        "own": newest.name,
        "document_tokens": (results.get("compression") or {}).get("document_tokens"),
        "cartridges": _described(chosen, chosen.stat().st_mtime, trained),
    }


def difference(view: RunView, name: str, a: str, b: str) -> dict[str, Any]:
    """Return how far a cartridge's numbers in checkpoint `b` are from those in `a`, layer by layer.
    Raises DataError for a cartridge or a checkpoint that is not there."""
    from cartridge_forge.plugins.library.formats.convert import changes
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_all

    read = [read_all(_path(view, one), [name])[name] for one in (a, b)]
    return {"name": name, "a": a, "b": b, "layers": [asdict(layer) for layer in changes(*read)]}


@lru_cache(maxsize=32)
def _described(checkpoint: Path, mark: float, dtype: str) -> list[Mapping[str, Any]]:
    """Return each cartridge of a checkpoint; `mark` changes with its files. `bytes` are those of
    the published cartridge, in the model's dtype."""
    import torch

    from cartridge_forge.plugins.library.formats.convert import norms
    from cartridge_forge.plugins.library.formats.run_checkpoint import read_all

    size = getattr(torch, dtype).itemsize
    return [
        {
            "name": name, "shape": list(one.kv.shape), "tokens": one.tokens, "frozen": one.frozen,
            "bytes": one.kv.numel() * size, "layers": [asdict(layer) for layer in norms(one)],
            "source": {key: one.facts.source.get(key) for key in ("version", "arm", "step")},
        }
        for name, one in read_all(checkpoint).items()
    ]  # fmt: skip


def _path(view: RunView, name: str) -> Path:
    from cartridge_forge.learning.checkpoint import list_checkpoints

    for path in list_checkpoints(view.run.checkpoints):
        if path.name == name:
            return path
    raise DataError(f"run {view.run.id} has no checkpoint {name[:60]!r} any more; load the page")
