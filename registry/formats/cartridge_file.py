"""One cartridge in memory, whatever file it came from: keys and values, and what is known of it.

    kv      [L, 2, H_kv, P, D]  layer, key or value, key/value head, position, head size
    frozen  F                   the leading positions that training left alone, 0 <= F < P

Keys are rotated (post-RoPE) for the positions 0..P-1, and the input stands at P. That is what
HazyResearch/cartridges, PEFT and Tokasaurus mean by their files too, none of which says so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from protocols.errors import DataError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POST_ROPE = "post-rope"


@dataclass(frozen=True)
class Provenance:
    """What a cartridge was made for and of; whatever is not known is empty.

    base            the model's name or path, as it was trained with
    config_sha256   `registry.formats.base_model.config_hash` of its config.json
    weights_sha256  `learning.model.loading.base_hash` of it, loaded as `weights_dtype`
    rope            `registry.formats.base_model.rope_of` its config.json: base, scaling
    first_position  where the cartridge begins; `keys` says whether they are rotated
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
        """Raises TypeError for other fields, or fields of other types."""
        made = cls(**plain)
        for name, kind in _KINDS.items():
            if not isinstance(getattr(made, name), kind):
                raise TypeError(f"{name} is {getattr(made, name)!r}")
        return made


_KINDS: dict[str, type] = {
    "base": str, "config_sha256": str, "weights_sha256": str, "weights_dtype": str,
    "rope": dict, "first_position": int, "keys": str, "source": dict,
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class CartridgeFile:
    """Raises DataError where kv is no [L, 2, H_kv, P, D] of finite numbers, or F is not below P."""

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
        if self.kv.dtype not in DTYPES.values():
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
        """The same in another dtype. Raises DataError where a number does not fit it."""
        return replace(self, kv=self.kv.to(DTYPES[dtype]))

    def label(self) -> str:
        """What is known of it and a checksum over that and the numbers, as one line: for formats
        that have room for a text. `labelled` reads it."""
        told = {"facts": asdict(self.facts), "frozen": self.frozen}
        return json.dumps(told | {"sha256": _sha256(told, self.kv)}, sort_keys=True)

    def with_source(self, source: Mapping[str, Any]) -> CartridgeFile:
        """The same, and it is known where from."""
        facts = replace(self.facts, source={**self.facts.source, **source})
        return replace(self, facts=facts)


def labelled(kv: Tensor, label: str, frozen: int | None = None) -> CartridgeFile:
    """A cartridge of these numbers and what its label says. `frozen` is what the file says besides.

    Raises DataError where they are not those that the label was written for.
    """
    try:
        told = json.loads(label)
        stated, held = told.pop("sha256"), int(told["frozen"])
        facts, found = Provenance.from_plain(told["facts"]), _sha256(told, kv)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise DataError(
            f"what the cartridge says of itself cannot be read ({error!r}); fetch it again"
        ) from error
    if stated != found or frozen not in (None, held):
        raise DataError("the cartridge does not match its checksum: it is damaged; fetch it again")
    return CartridgeFile(kv, held, facts)


def _sha256(told: Mapping[str, Any], kv: Tensor) -> str:
    plain = {**told, "shape": list(kv.shape), "dtype": str(kv.dtype)}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for layer in kv:
        digest.update(layer.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
