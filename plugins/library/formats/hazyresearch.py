"""Read and write HazyResearch/cartridges' `.pt`: a zip with a pickle, read by a restricted loader.

    {"trainable_keys":   ParameterList of L [1, H_kv, P-F, D]
     "trainable_values": ...
     "frozen_keys":      ParameterList of L [1, H_kv, F, D]    or, in older files, "fixed_keys"
     "frozen_values":    ...                                                       "fixed_values"
     "forge":            this project's label: provenance and checksum, ignored by other readers}

`save` stores the frozen lists under both names; a pickle holds them once. Old and new versions of
HazyResearch's code read such a file, and so does Tokasaurus. Without frozen tokens the lists hold
tensors [1, H_kv, 0, D]: their own `save` writes an empty list, which their own loader refuses.

A pickle can run any code when it is loaded plainly. `torch.load(weights_only=True)` builds tensors,
containers and ParameterLists, and refuses all else by name. `parse` verifies the zip's checksums
first, because torch does not.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter, ParameterList

from cartridge_forge.plugins.host.limited_process import (
    BrokenLimitError,
    LimitedProcess,
    ProcessLimits,
)
from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.formats.cartridge_file import (
    DTYPES,
    OF_OTHERS,
    CartridgeFile,
    labelled,
)
from cartridge_forge.protocols.errors import DataError

LABEL = "forge"
PROCESS = LimitedProcess(
    "cartridge_forge.plugins.library.formats.pickle_process:convert",
    ProcessLimits(cpu_s=60, wall_s=300, memory=2**29, file_bytes=2**36),
)
SPELLINGS = ("frozen", "fixed")
REMEDY = (
    "a cartridge's .pt is what torch.save writes of a dict of ParameterLists, and no other pickle "
    f"is loaded; {OF_OTHERS}"
)


def save(cartridge: CartridgeFile, file: Path) -> None:
    """Write a `.pt` at a path that is free."""
    frozen, learned = cartridge.kv.tensor_split([cartridge.frozen], dim=3)
    state: dict[str, Any] = {
        "trainable_keys": _parameters(learned[:, 0], True),
        "trainable_values": _parameters(learned[:, 1], True),
        LABEL: cartridge.label(),
    }
    keys, values = _parameters(frozen[:, 0], False), _parameters(frozen[:, 1], False)
    for spelling in SPELLINGS:
        state |= {f"{spelling}_keys": keys, f"{spelling}_values": values}
    # torch.save stores the name of a path in the file. It is as confidential as its document.
    with open(file, "wb", opener=partial(os.open, mode=0o600)) as opened:
        torch.save(state, opened)


def read(path: Path) -> CartridgeFile:
    """Read a `.pt` of either spelling in a process with limits: a pickle of some hundred bytes can
    ask for years of hashing. Raises DataError; nothing in the file is ever executed."""
    with TemporaryDirectory(prefix="forge-pt-") as folder:
        file = Path(folder) / forge.FILE
        request = {"path": str(path.absolute()), "into": str(file), "cache": False}
        try:
            PROCESS.call(request, size=path.stat().st_size)
        except BrokenLimitError as error:
            raise _refused(path, f"it {error}") from None
        return forge.read_file(file)


def parse(path: Path) -> CartridgeFile:
    """Read a `.pt` in this process. Raises DataError."""
    state, size = load_state(path, [ParameterList]), path.stat().st_size
    if not isinstance(state, dict):
        raise _refused(path, f"it holds a {type(state).__name__} and no dict")
    learned = {kind: _layers(state, f"trainable_{kind}", size) for kind in ("keys", "values")}
    frozen_parts = _kept(state, size)
    for kind, layers in frozen_parts.items():
        # HazyResearch's `save` writes an empty list where no token is frozen.
        frozen_parts[kind] = layers or [tensor[:, :, :0] for tensor in learned[kind]]
    _require_alike(learned, frozen_parts)
    kv = [
        torch.cat([torch.stack(frozen_parts[kind]), torch.stack(learned[kind])], dim=3)
        for kind in ("keys", "values")
    ]
    whole_kv = torch.stack(kv, dim=1)[:, :, 0].contiguous()  # [L, 2, 1, H_kv, P, D] without the 1
    frozen = frozen_parts["keys"][0].shape[2]
    if LABEL in state:
        return labelled(whole_kv, state[LABEL], frozen)
    return CartridgeFile(whole_kv, frozen)


def _parameters(kv: Tensor, trainable: bool) -> ParameterList:
    """Return [L, H_kv, T, D] as L parameters [1, H_kv, T, D], each with a storage of its own: a
    pickled view would store the whole tensor."""
    return ParameterList(
        [
            Parameter(layer[None].clone(memory_format=torch.contiguous_format), trainable)
            for layer in kv
        ]
    )


def load_state(path: Path, classes: Sequence[type | tuple[type, str]], remedy: str = REMEDY) -> Any:
    """Return what `torch.save` wrote at `path`: tensors, containers, and objects of `classes`, each
    a class or a class and the name for which it stands. Raises DataError, with the remedy."""
    try:
        with zipfile.ZipFile(path) as opened:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in opened.infolist()):
                raise _refused(
                    path, "its parts are compressed, which torch.save never does", remedy
                )
            broken = opened.testzip()
        if broken is not None:
            raise _refused(path, f"{broken} does not match its checksum: it is damaged", remedy)
        with torch.serialization.safe_globals(list(classes)):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refused(path, _short(error), remedy) from error
    except DataError:
        raise
    except Exception as error:  # a damaged zip or pickle fails in any way there is
        raise _refused(path, f"{type(error).__name__}: {_short(error)}", remedy) from error


def _layers(state: dict[str, Any], key: str, size: int) -> list[Tensor]:
    """Return one list of a file of `size` bytes; only that of frozen tokens may be empty."""
    try:
        value = state[key]
        if not isinstance(value, ParameterList | list | tuple):
            raise TypeError(f"it is a {type(value).__name__}")
        layers = [tensor.detach() for tensor in value]
    except (LookupError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        have = ", ".join(map(str, state)) or "nothing"
        raise DataError(
            f"a HazyResearch cartridge has a list of tensors {key} ({error!r}); this file has "
            f"{have}"
        ) from error
    if not layers and key.startswith("trainable"):
        raise DataError(f"{key} has no layers; the file is empty, or was cut")
    for number, tensor in enumerate(layers):
        if tensor.dim() != 4 or tensor.shape[0] != 1:
            raise DataError(
                f"{key}[{number}] has the shape {list(tensor.shape)}; each layer is "
                "[1, H_kv, tokens, D]"
            )
        if tensor.layout is not torch.strided or tensor.dtype not in DTYPES.values():
            raise DataError(
                f"{key}[{number}] is {tensor.layout} of {tensor.dtype}; a cartridge is float32, "
                "bfloat16 or float16"
            )
    nbytes = sum(tensor.nbytes for tensor in layers)
    if nbytes > size:  # a stride of 0 makes a small file a large tensor
        raise DataError(f"{key} claims {nbytes} bytes of numbers, and the file has {size}")
    return layers


def _kept(state: dict[str, Any], size: int) -> dict[str, list[Tensor]]:
    """Return the frozen lists; where both spellings are present, they must be equal."""
    spellings = [s for s in SPELLINGS if f"{s}_keys" in state]
    if not spellings:
        have = ", ".join(map(str, state)) or "nothing"
        raise DataError(
            f"a HazyResearch cartridge has frozen_keys (older: fixed_keys); this file has {have}"
        )
    layers_of = {}
    for kind in ("keys", "values"):
        lists = [_layers(state, f"{spelling}_{kind}", size) for spelling in spellings]
        if not all(_same(lists[0], other) for other in lists[1:]):
            raise DataError(f"frozen_{kind} and fixed_{kind} are both there and differ")
        layers_of[kind] = lists[0]
    return layers_of


def _same(mine: list[Tensor], other: list[Tensor]) -> bool:
    return len(mine) == len(other) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(mine, other, strict=True)
    )


def _require_alike(learned: dict[str, list[Tensor]], frozen: dict[str, list[Tensor]]) -> None:
    """Require one shape and dtype of all layers; frozen layers may differ in tokens alone."""
    dtype = learned["keys"][0].dtype
    for part, lists in (("trainable", learned), ("frozen", frozen)):
        first = lists["keys"][0]
        for kind, tensors in lists.items():
            if len(tensors) != len(learned["keys"]):
                raise DataError(
                    f"{part}_{kind} has {len(tensors)} layers, trainable_keys "
                    f"{len(learned['keys'])}; the file was cut, or mixes models"
                )
            for number, tensor in enumerate(tensors):
                if tensor.shape != first.shape:
                    raise DataError(
                        f"{part}_{kind}[{number}] is {list(tensor.shape)}, {part}_keys[0] "
                        f"{list(first.shape)}; all layers of a cartridge are alike"
                    )
                if tensor.dtype != dtype:
                    raise DataError(
                        f"{part}_{kind}[{number}] is {tensor.dtype}, trainable_keys[0] {dtype}; "
                        "all layers of a cartridge are alike: convert them before they are saved"
                    )
    mine, other = frozen["keys"][0].shape, learned["keys"][0].shape
    if (mine[1], mine[3]) != (other[1], other[3]):
        turned = mine[2:] == other[2:]
        raise DataError(
            f"frozen layers are {list(mine)}, trainable ones {list(other)}: they may differ in "
            "axis 2, the tokens, alone; [1, H_kv, tokens, D] is the order"
            + (", and these seem to have tokens in axis 1: swap axes 1 and 2" if turned else "")
        )


def _refused(path: Path, why: str, remedy: str = REMEDY) -> DataError:
    return DataError(f"{path.name} is refused: {why}; {remedy}")


def _short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return (named or lines or [type(error).__name__])[0][:200]
