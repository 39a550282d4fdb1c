"""Hold one cartridge in memory, in whatever format it was stored: keys, values and provenance.

    kv      [L, 2, H_kv, P, D]  layer, key or value, key/value head, position, head size
    frozen  F                   the leading positions that are not trained, 0 <= F < P

Keys are rotated (post-RoPE) for the positions 0..P-1, and the input starts at P. The files of
HazyResearch/cartridges, PEFT and Tokasaurus mean the same, though none of them states it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cartridge_forge.protocols.errors import DataError

if TYPE_CHECKING:  # torch takes a second to import, and lists of cartridges need none of it
    import torch
    from torch import Tensor

HEADER_BYTES = 4 * 1024**2  # of a safetensors file: one tensor, its label and its source
DTYPES: Mapping[str, torch.dtype]  # by name, made by `__getattr__` at the first import
POST_ROPE = "post-rope"
OF_OTHERS = (
    "a KV cache that another program compacted is read by forge convert with --model DIR and "
    "--document-tokens T"
)


@dataclass(frozen=True)
class Provenance:
    """Describe a cartridge's model and source; what is not known is empty.

    base            the model's name or path, as it was trained with
    config_sha256   `plugins.library.formats.base_model.config_hash` of its config.json
    weights_sha256  `learning.model.loading.base_hash` of it, loaded as `weights_dtype`
    rope            `plugins.library.formats.base_model.rope_of` its config.json: base, scaling
    first_position  position of the cartridge's first token; `keys` says whether keys are rotated
    source          JSON: run, checkpoint, step, the data's hash, metrics
    """

    base: str = ""
    config_sha256: str = ""
    weights_sha256: str = ""
    weights_dtype: str = ""
    rope: Mapping[str, Any] = field(default_factory=dict)
    first_position: int = 0
    keys: str = POST_ROPE
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Provenance:
        """Build from plain values. Raises TypeError for other fields, or fields of other types."""
        provenance = cls(**plain)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(provenance, name), kind):
                raise TypeError(f"{name} is {getattr(provenance, name)!r}")
        return provenance


_KINDS: dict[str, type] = {
    "base": str, "config_sha256": str, "weights_sha256": str, "weights_dtype": str,
    "rope": dict, "first_position": int, "keys": str, "source": dict,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CartridgeFile:
    """Hold kv, frozen tokens and facts. Raises DataError unless kv is [L, 2, H_kv, P, D] of finite
    numbers in a supported dtype, and F is below P."""

    kv: Tensor
    frozen: int = 0
    facts: Provenance = Provenance()

    def __post_init__(self) -> None:
        shape = tuple(self.kv.shape)
        if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
            raise DataError(
                "a cartridge has the shape [L, 2, H_kv, P, D], keys and values of each layer: got "
                f"{list(shape)}"
            )
        if not 0 <= self.frozen < self.tokens:
            raise DataError(
                f"0 <= frozen < P={self.tokens}: got {self.frozen} frozen tokens, which leaves "
                "none to train"
            )
        if self.kv.dtype not in _dtypes().values():
            raise DataError(f"a cartridge is float32, bfloat16 or float16: got {self.kv.dtype}")
        for layer, part in enumerate(self.kv):
            if not bool(part.isfinite().all()):
                raise DataError(
                    f"layer {layer} of the cartridge holds numbers that are not finite; it came "
                    "apart in training, or was damaged: take an earlier checkpoint"
                )

    @property
    def layers(self) -> int:
        return self.kv.shape[0]

    @property
    def heads(self) -> int:
        return self.kv.shape[2]

    @property
    def tokens(self) -> int:
        return self.kv.shape[3]

    @property
    def head_dim(self) -> int:
        return self.kv.shape[4]

    @property
    def dtype(self) -> str:
        return str(self.kv.dtype).removeprefix("torch.")

    def to(self, dtype: str) -> CartridgeFile:
        """Return the cartridge in another dtype. Raises DataError where a number overflows it."""
        return replace(self, kv=self.kv.to(_dtypes()[dtype]))

    def label(self) -> str:
        """Return facts, frozen tokens and a checksum over these and kv as one line of JSON, for
        formats that can store a text. `labelled` reads it."""
        described = {"facts": asdict(self.facts), "frozen": self.frozen}
        return json.dumps(described | {"sha256": _sha256(described, self.kv)}, sort_keys=True)

    def with_source(self, source: Mapping[str, Any]) -> CartridgeFile:
        """Return the cartridge with `source` merged into its provenance."""
        facts = replace(self.facts, source={**self.facts.source, **source})
        return replace(self, facts=facts)


CHAT_DATE = "chat_date"  # in the source of a cartridge


def source_of(date: datetime | None) -> dict[str, str]:
    """Return the entry of a cartridge's source that keeps a date; {} for none."""
    return {} if date is None else {CHAT_DATE: date.isoformat(timespec="seconds")}


def date_of(source: Mapping[str, Any]) -> datetime | None:
    """Return the date that a cartridge's source keeps; None where it keeps none that can be
    read."""
    try:
        return datetime.fromisoformat(source[CHAT_DATE])
    except (KeyError, TypeError, ValueError):
        return None


def require_small_header(file: Path) -> None:
    """Raise DataError where a safetensors file says that its header, JSON that is parsed as a
    whole, has more than HEADER_BYTES. A file that is too short is its reader's to refuse."""
    try:
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
    except OSError:
        return
    if HEADER_BYTES < size <= file.stat().st_size:
        raise DataError(
            f"the header of {file.name} says it has {size:,} bytes, and a cartridge's has at most "
            f"{HEADER_BYTES:,}: this is no safetensors file of a cartridge; fetch it again"
        )


def labelled(kv: Tensor, label: str, frozen: int | None = None) -> CartridgeFile:
    """Return the cartridge of `kv` and its label. `frozen` is the file's own count, if any.

    Raises DataError where the label is unreadable or does not match kv or `frozen`.
    """
    try:
        described = json.loads(label)
        stated, stated_frozen = described.pop("sha256"), int(described["frozen"])
        facts, computed = Provenance.from_plain(described["facts"]), _sha256(described, kv)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"what the cartridge says of itself cannot be read ({error!r}); fetch it again"
        ) from error
    if stated != computed or frozen not in (None, stated_frozen):
        raise DataError("the cartridge does not match its checksum: it is damaged; fetch it again")
    return CartridgeFile(kv, stated_frozen, facts)


@cache
def _dtypes() -> Mapping[str, torch.dtype]:
    import torch

    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def __getattr__(name: str) -> Any:
    if name == "DTYPES":
        return _dtypes()
    raise AttributeError(name)


def _sha256(described: Mapping[str, Any], kv: Tensor) -> str:
    import torch

    plain = {**described, "shape": list(kv.shape), "dtype": str(kv.dtype)}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for layer in kv:
        digest.update(layer.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
