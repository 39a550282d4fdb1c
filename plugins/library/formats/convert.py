"""Detect the format of a cartridge's path, read any format, convert between them, and compare
cartridges: norms of each layer, distances between two cartridges, differing facts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

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
        """Write a file or directory as `new_path` does."""
        with new_path(path, force) as partial:
            self.save(cartridge, partial)


@contextmanager
def new_path(path: Path, force: bool = False) -> Iterator[Path]:
    """Yield a path to write a file or directory at, which is at `path` as a whole when the block
    ends (`protocols.files.replacing`).

    Raises DataError where `path` exists, unless `force`: then it is replaced at the end.
    """
    if os.path.lexists(path) and not force:
        raise DataError(f"{path} is there already; give another path, or --force to replace it")
    if not path.parent.is_dir():
        raise DataError(f"there is no directory {path.parent} to write {path.name} in; make it")
    with replacing(path) as partial:
        yield partial


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


@dataclass(frozen=True)
class LayerNorms:
    """Hold root mean squares over heads, positions and head size; largest absolute values."""

    keys: float
    values: float
    largest_key: float
    largest_value: float


@dataclass(frozen=True)
class LayerChange:
    """Hold |b - a| / |a| and the cosine between a and b, over one layer's keys and its values."""

    keys: float
    values: float
    keys_cosine: float
    values_cosine: float


def norms(cartridge: CartridgeFile) -> list[LayerNorms]:
    """Return the norms of every layer."""
    return [
        LayerNorms(
            *(float(part.square().mean().sqrt()) for part in layer),
            *(float(part.abs().max()) for part in layer),
        )
        for layer in map(Tensor.double, cartridge.kv)
    ]


def changes(a: CartridgeFile, b: CartridgeFile) -> list[LayerChange]:
    """Compare two cartridges layer by layer. Raises DataError for different shapes."""
    if a.kv.shape != b.kv.shape:
        raise DataError(
            f"{list(a.kv.shape)} and {list(b.kv.shape)} cannot be compared number by number"
        )
    differences = []
    for mine, other in zip(map(Tensor.double, a.kv), map(Tensor.double, b.kv), strict=True):
        parts = list(zip(mine, other, strict=True))
        differences.append(
            LayerChange(*(_relative(*pair) for pair in parts), *(_cosine(*pair) for pair in parts))
        )
    return differences


def differences(a: CartridgeFile, b: CartridgeFile) -> list[tuple[str, str, str]]:
    """Return (fact, in a, in b) where shape, dtype, frozen tokens or provenance differ."""
    mine, other = dict(_plain(a)), dict(_plain(b))
    keys = sorted(mine.keys() | other.keys())
    rows = ((key, mine.get(key, "-"), other.get(key, "-")) for key in keys)
    return [row for row in rows if row[1] != row[2]]


def provenance(cartridge: CartridgeFile) -> list[tuple[str, str]]:
    """Return the known facts as (key, text), nested keys joined with dots."""
    return [(key, value) for key, value in _flat(asdict(cartridge.facts)) if value]


def _plain(cartridge: CartridgeFile) -> Iterator[tuple[str, str]]:
    yield "shape", str(list(cartridge.kv.shape))
    yield "dtype", cartridge.dtype
    yield "frozen", str(cartridge.frozen)
    yield from provenance(cartridge)


def _flat(plain: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in plain.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", str(value)


def _relative(a: Tensor, b: Tensor) -> float:
    norm, apart = float(a.norm()), float((b - a).norm())
    return 0.0 if apart == 0 else apart / norm if norm else float("inf")


def _cosine(a: Tensor, b: Tensor) -> float:
    if bool((a == b).all()):
        return 1.0  # also of zeros, which have no direction
    norm = float(a.norm() * b.norm())
    return float((a * b).sum()) / norm if norm else 0.0
