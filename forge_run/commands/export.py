"""Export a cartridge for another engine: `forge export`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from cartridge_forge.forge_run.commands.ask import model_of
from cartridge_forge.plugins.library.exports.engines import export as write_export
from cartridge_forge.plugins.library.formats import convert, forge
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.names import parse_cartridge
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.serve.spec import load_serve
from cartridge_forge.protocols.files import named_model


def export(
    *,
    cartridge: str,
    engine: str,
    out: Path,
    name: str | None,
    dtype: str | None,
    mesh: str,
    sets: Sequence[str],
) -> int:
    """Write a cartridge, of a library by its name or of a path, to the folder `out` for an engine,
    with the model that it was made for. Raises DataError."""
    spec = load_serve(mesh, sets=sets).spec
    base = read_base(Path(spec.model.path))
    if Path(cartridge).exists():
        file = convert.read(Path(cartridge), name)
        title = name or Path(cartridge).absolute().stem
        is_known = named_model(file.facts.base) is not None
    else:
        entry = CartridgeStore(Path(spec.library), base).get(parse_cartridge(cartridge))
        file, title = forge.read(entry.path.parent), name or entry.manifest.name
        is_known = True  # or model_of refuses it
    chosen = model_of(cartridge, file.facts, spec.model, base) if is_known else spec.model
    model = Path(chosen.path)
    file = write_export(file if dtype is None else file.to(dtype), title, engine, model, out)
    print(f"{out}: {title} for {engine}, {file.tokens} tokens, {file.dtype}; read {out}/README.md")
    return 0
