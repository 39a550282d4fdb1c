"""Compare cartridges: norms of each layer, distances between two cartridges, differing facts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.protocols.errors import DataError


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
