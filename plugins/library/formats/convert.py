"""Detect the format of a cartridge's path, read any format, and convert between them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cartridge_forge.plugins.library.formats import (
    forge,
    hazyresearch,
    peft,
    run_checkpoint,
    tokasaurus,
)
from cartridge_forge.plugins.library.formats.cartridge_file import DTYPES, CartridgeFile
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import replacing


@dataclass(frozen=True)
class CartridgeFormat:
    """Pair `read(path)`, which raises DataError, with `save(cartridge, path)` to a free path."""

    read: Callable[[Path], CartridgeFile]
    save: Callable[[CartridgeFile, Path], None]

    def write(self, cartridge: CartridgeFile, path: Path, force: bool = False) -> None:
        """Write a file or directory as a whole (`protocols.files.replacing`).

        Raises DataError where `path` exists, unless `force`: then it is replaced at the end.
        """
        if os.path.lexists(path) and not force:
            raise DataError(f"{path} is there already; give another path, or --force to replace it")
        if not path.parent.is_dir():
            raise DataError(f"there is no directory {path.parent} to write {path.name} in; make it")
        with replacing(path) as partial:
            self.save(cartridge, partial)


FORMATS = {
    "forge": CartridgeFormat(forge.read, forge.save),
    "hazy": CartridgeFormat(hazyresearch.read, hazyresearch.save),
    "peft": CartridgeFormat(peft.read, peft.save),
    "tokasaurus": CartridgeFormat(tokasaurus.read, tokasaurus.save),
}
RUN = "run"


def detect(path: Path) -> str:
    """Return the name of the path's format, or `run` for a run or checkpoint. Raises DataError."""
    if not path.exists():
        raise DataError(f"there is nothing at {path}")
    if path.is_file():
        by_suffix = {".safetensors": "forge", ".pt": "hazy", ".pth": "hazy", ".torch": "hazy"}
        if path.suffix in by_suffix:
            return by_suffix[path.suffix]
    elif (path / peft.CONFIG).is_file():
        return "peft"
    elif (path / tokasaurus.FILE).is_file() or (path / tokasaurus.CONFIG).is_file():
        return "tokasaurus"
    elif (path / forge.FILE).is_file():
        return "forge"
    elif run_checkpoint.is_run(path):
        return RUN
    raise DataError(
        f"{path} is no cartridge: give a directory of ours, a run, a NAME.pt of HazyResearch's, a "
        f"directory with {peft.CONFIG}, or one with {tokasaurus.FILE} and {tokasaurus.CONFIG}"
    )


def read(path: Path, name: str | None = None) -> CartridgeFile:
    """Read any format; `name` chooses a cartridge of a run. Raises DataError or CheckpointError."""
    format_name = detect(path)
    return (
        run_checkpoint.read(path, name) if format_name == RUN else FORMATS[format_name].read(path)
    )


def losses(cartridge: CartridgeFile, to: str, dtype: str | None) -> list[str]:
    """Return what a conversion would change, and why its reader would refuse the result."""
    notes = []
    if dtype is not None and cartridge.to(dtype).to(cartridge.dtype).kv.ne(cartridge.kv).any():
        notes.append(f"numbers are rounded from {cartridge.dtype} to {dtype}")
    unservable = tokasaurus.unservable(cartridge) if to == "tokasaurus" else None
    return [*notes, *([unservable] if unservable else [])]


def convert(
    cartridge: CartridgeFile, path: Path, to: str, *, dtype: str | None = None, force: bool = False
) -> None:
    """Write the cartridge in format `to`, in `dtype` if one is given. Raises DataError."""
    if to not in FORMATS:
        raise DataError(f"there is no format {to}; there are {', '.join(FORMATS)}")
    if dtype is not None and dtype not in DTYPES:
        raise DataError(f"a cartridge is {', '.join(DTYPES)}: got {dtype}")
    FORMATS[to].write(cartridge if dtype is None else cartridge.to(dtype), path, force)
