"""Read KV caches that other programs compacted: the keys, values and biases of each layer; write
them for others.

    NAME.pt             torch.save of a list of (keys, values), or of (keys, biases, values), one
                        tuple for each layer; or of a transformers DynamicCache
    NAME.safetensors    tensors keys.0, values.0, biases.0, keys.1, ...

    keys, values    [1, H_kv, t, D]    keys are rotated for positions of the document
    biases          [1, H_kv, t]       are added to scaled scores; one up to HIDDEN hides the entry

Attention matching (Zweiger et al.) makes caches with biases, the presses of kvpress those without.
A cartridge has as many entries in every head, so each head must have as many that are not hidden.
The order of entries changes no attention, and hidden ones are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cartridge_forge.plugins.host.limited_process import BrokenLimitError
from cartridge_forge.plugins.library.formats import hazyresearch
from cartridge_forge.plugins.library.formats.cartridge_file import DTYPES, require_small_header
from cartridge_forge.protocols.errors import DataError

HIDDEN = -1e4  # a bias from which on the weight of an entry is 0 in every dtype
KINDS = {"keys": 4, "biases": 3, "values": 4}  # tensors of a layer, and their dimensions
SHAPES = "keys and values are [1, H_kv, t, D], biases [1, H_kv, t]"
REMEDY = (
    "save torch.save([(keys, values), ...], path), or with biases [(keys, biases, values), ...], "
    "one for each layer"
)


class SavedLayer:
    """Stand for a layer of a cache in a pickle: its tensors are attributes."""


class SavedCache:
    """Stand for a cache in a pickle: `layers` is a list of SavedLayer."""


CLASSES = (
    (SavedCache, "transformers.cache_utils.DynamicCache"),
    (SavedLayer, "transformers.cache_utils.DynamicLayer"),
    (SavedCache, "models.cache.CompactedPrefixCache"),
    (SavedLayer, "models.cache.CompactedPrefixLayer"),
)


@dataclass(frozen=True, eq=False)
class CompactedCache:
    """Hold keys and values `kv` [L, 2, H_kv, P, D], and `biases` [L, H_kv, P] in float64; None
    where all are 0."""

    kv: Tensor
    biases: Tensor | None


def read(path: Path) -> CompactedCache:
    """Read a cache; a pickle in a process with limits. Raises DataError."""
    if not path.is_file():
        raise DataError(f"{path} is no file: a compacted cache is a .pt or .safetensors")
    if path.suffix == ".safetensors":
        return checked(_tensors(path), path.name)
    with TemporaryDirectory(prefix="forge-cache-") as folder:
        file = Path(folder) / "cache.safetensors"
        request = {"path": str(path.absolute()), "into": str(file), "cache": True}
        try:
            hazyresearch.PROCESS.call(request, size=path.stat().st_size)
        except BrokenLimitError as error:
            raise DataError(f"{path.name} is refused: it {error}") from None
        return checked(_tensors(file), path.name)


def save(kv: Tensor, file: Path, metadata: Mapping[str, str]) -> None:
    """Write keys and values [L, 2, H_kv, P, D] as the tensors of a `.safetensors`."""
    parts = {
        f"{kind}.{number}": layer[axis][None].contiguous()
        for number, layer in enumerate(kv)
        for axis, kind in enumerate(("keys", "values"))
    }
    save_file(parts, file, metadata=dict(metadata))


def unpack(path: Path, into: Path) -> None:
    """Write the tensors of a `.pt` as safetensors. Raises DataError."""
    state, tensors = hazyresearch.load_state(path, CLASSES, REMEDY), {}
    size = path.stat().st_size
    for number, layer in enumerate(_layers(state, path.name)):
        for kind, tensor in layer.items():
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
                raise DataError(
                    f"{path.name}: {kind} of layer {number} are {what}, and a tensor of numbers is "
                    f"needed: {SHAPES}"
                )
            size -= tensor.nbytes
            if size < 0:  # a stride of 0 makes a small file a large tensor
                raise DataError(
                    f"{path.name} claims more numbers than it has, up to {kind} of layer {number}; "
                    "save contiguous tensors of their own"
                )
            tensors[f"{kind}.{number}"] = tensor.detach().clone(
                memory_format=torch.contiguous_format
            )
    save_file(tensors, into)


def _layers(state: Any, name: str) -> Iterator[Mapping[str, Any]]:
    """Yield each layer's tensors by kind. Raises DataError."""
    if isinstance(state, SavedCache):
        rows = [
            [getattr(layer, k, None) for k in ("keys", "beta", "values") if hasattr(layer, k)]
            for layer in getattr(state, "layers", ())
        ]
    elif isinstance(state, list | tuple):
        rows = list(state)
    else:
        raise DataError(f"{name} holds a {type(state).__name__} and no list of layers: {REMEDY}")
    if not rows:
        raise DataError(f"{name} has no layers; it is empty, or was cut")
    for number, row in enumerate(rows):
        parts = list(row) if isinstance(row, list | tuple) else []
        if len(parts) == 3 and parts[2] is None:  # of iteration over a DynamicCache
            parts = parts[:2]
        if len(parts) not in (2, 3):
            what = f"{len(parts)} parts" if parts else f"a {type(row).__name__}"
            raise DataError(f"{name}: layer {number} is {what}: {REMEDY}")
        yield dict(zip(KINDS if len(parts) == 3 else ("keys", "values"), parts, strict=True))


def _tensors(file: Path) -> dict[str, Tensor]:
    require_small_header(file)
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise DataError(f"{file.name} is no safetensors file ({error}); save it again") from error


def checked(tensors: Mapping[str, Tensor], name: str) -> CompactedCache:
    """Return the cache of `tensors` "KIND.LAYER" of a file `name`, without its hidden entries.
    Raises DataError with the layer and head."""
    layers = len({key.partition(".")[2] for key in tensors})
    kinds = KINDS if any(key.startswith("biases.") for key in tensors) else ("keys", "values")
    wanted = {f"{kind}.{layer}" for layer in range(layers) for kind in kinds}
    if not tensors or wanted != set(tensors):
        odd = sorted(wanted.symmetric_difference(tensors))[:1] or ["nothing"]
        lack = "lacks" if odd[0] in wanted else "has" if tensors else "holds"
        raise DataError(
            f"{name} {lack} {odd[0]}: each of its layers 0, 1, ... has keys.N and values.N, and "
            "all or none of them biases.N"
        )
    parts = [{kind: tensors[f"{kind}.{layer}"] for kind in kinds} for layer in range(layers)]
    for layer, part in enumerate(parts):
        _check_shapes(part, parts[0], f"{name}: layer {layer}")
    visible = [_visible(part, f"{name}: layer {n}") for n, part in enumerate(parts)]
    counts = [[len(index) for index in heads] for heads in visible]
    fewest, most = min(map(min, counts)), max(map(max, counts))
    if fewest != most:
        places = {
            count: f"layer {layer} head {head} has {count}"
            for layer, heads in enumerate(counts)
            for head, count in enumerate(heads)
        }
        raise DataError(
            f"{name}: heads are of unequal length, without the entries that a bias of -inf hides: "
            f"{places[fewest]}, {places[most]}; a cartridge has as many in every head: compact "
            "again with an equal budget for all heads and layers"
        )
    if not most:
        raise DataError(f"{name} has no entries that are not hidden; compact it to at least one")
    kv = torch.stack(
        [
            torch.stack([_chosen(part[kind][0], heads) for kind in ("keys", "values")])
            for part, heads in zip(parts, visible, strict=True)
        ]
    )
    for layer, head in (~kv.isfinite().all(-1).all(-1).all(1)).nonzero().tolist():
        raise DataError(
            f"{name}: layer {layer} head {head} holds keys or values that are not finite; compact "
            "it again, in float32 or bfloat16"
        )
    if "biases" not in kinds:
        return CompactedCache(kv, None)
    biases = torch.stack(
        [_chosen(p["biases"][0].double(), heads) for p, heads in zip(parts, visible, strict=True)]
    )
    return CompactedCache(kv, biases if bool(biases.any()) else None)


def _check_shapes(part: Mapping[str, Tensor], first: Mapping[str, Tensor], where: str) -> None:
    """Raise DataError unless a layer's tensors agree with each other and with the first layer's."""
    keys = part["keys"]
    for kind, tensor in part.items():
        shape, expected = list(tensor.shape), list(keys.shape)[: KINDS[kind]]
        if len(shape) != KINDS[kind] or shape[0] != 1 or shape != expected or not shape[1]:
            raise DataError(
                f"{where}: {kind} are {shape}, and keys {list(keys.shape)}; {SHAPES}, of one "
                "document at a time"
            )
        if tensor.dtype not in (*DTYPES.values(), *([torch.float64] if kind == "biases" else [])):
            raise DataError(
                f"{where}: {kind} are {tensor.dtype}; they are float32, bfloat16 or float16: "
                "convert them before they are saved"
            )
    top = first["keys"]
    kinds = {(x.shape[1], x.shape[3], x.dtype) for x in (keys, part["values"], top)}
    if len(kinds) > 1:
        raise DataError(
            f"{where}: keys are {list(keys.shape)} of {keys.dtype}, values of "
            f"{part['values'].dtype}, keys of layer 0 {list(top.shape)} of {top.dtype}; they "
            "may differ in the number of entries alone"
        )


def _visible(part: Mapping[str, Tensor], where: str) -> list[Tensor]:
    """Return the indices of each head's entries that are not hidden. Raises DataError for a bias
    that is no number."""
    if "biases" not in part:
        return [torch.arange(part["keys"].shape[2])] * part["keys"].shape[1]
    biases = part["biases"][0]
    for head, entry in (biases.isnan() | biases.isposinf()).nonzero().tolist():
        raise DataError(
            f"{where} head {head} entry {entry} has a bias of {float(biases[head, entry])}: it is "
            "a number, or -inf for an entry that is hidden; compact it again"
        )
    return [(row > HIDDEN).nonzero()[:, 0] for row in biases]


def _chosen(tensor: Tensor, heads: Sequence[Tensor]) -> Tensor:
    """Return [H_kv, P, ...] of [H_kv, t, ...] by the indices [P] of each head."""
    return torch.stack([row[index] for row, index in zip(tensor, heads, strict=True)])
