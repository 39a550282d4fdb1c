"""Read and write Hugging Face PEFT's CARTRIDGE adapter, which `PeftModel.from_pretrained` loads.

    adapter_config.json          sizes, frozen tokens, the base model's name
    adapter_model.safetensors    one tensor "prompt_embeddings" [P, L * 2 * H_kv * D]

A row is one position: for each layer its key of every head, then its value. PEFT passes them to the
model as a filled cache, so the prompt's positions follow at P; keys are already rotated, as in
`CartridgeFile`. The config cannot hold provenance and checksum; the tensor file's header does.

Prefix tuning is read as well: PEFT saves the same tensor for it, of keys and values as the model
gets them, whether they were trained through a projection or not, and none of them is frozen.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from cartridge_forge.plugins.library.formats.cartridge_file import (
    CartridgeFile,
    Provenance,
    labelled,
    require_small_header,
)
from cartridge_forge.protocols.errors import DataError

CONFIG, WEIGHTS, TENSOR = "adapter_config.json", "adapter_model.safetensors", "prompt_embeddings"
PICKLE = "adapter_model.bin"
KIND = "CARTRIDGE"
PREFIX = "PREFIX_TUNING"
LABEL = "forge"
PEFT_VERSION = "0.21.2"  # the version of these fields, with which the tests load them


def save(cartridge: CartridgeFile, folder: Path) -> None:
    """Write an adapter's directory at a path that is free."""
    config = {
        "peft_type": KIND,
        "peft_version": PEFT_VERSION,
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": cartridge.facts.base or None,
        "revision": None,
        "inference_mode": True,
        "num_virtual_tokens": cartridge.tokens,
        "num_frozen_tokens": cartridge.frozen,
        "num_layers": cartridge.layers,
        "num_attention_heads": cartridge.heads,  # PEFT's name for H_kv, once it knows the model
        "token_dim": cartridge.heads * cartridge.head_dim,
        "num_transformer_submodules": 1,
    }
    folder.mkdir(mode=0o700)  # it is as confidential as its document
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    # One key: safetensors writes several in another order in each process, so in other bytes.
    metadata = {LABEL: cartridge.label()}
    save_file({TENSOR: rows_of(cartridge.kv)}, folder / WEIGHTS, metadata=metadata)


def rows_of(kv: Tensor) -> Tensor:
    """Return keys and values [L, 2, H_kv, P, D] as the adapter's tensor [P, L * 2 * H_kv * D]."""
    return kv.permute(3, 0, 1, 2, 4).reshape(kv.shape[3], -1).contiguous()


def kv_of_rows(rows: Tensor, layers: int, heads: int) -> Tensor:
    """Return the keys and values [L, 2, H_kv, P, D] of an adapter's tensor."""
    kv = rows.view(rows.shape[0], layers, 2, heads, -1)
    return kv.permute(1, 2, 3, 0, 4).contiguous()


def read(path: Path) -> CartridgeFile:
    """Read an adapter's directory. Raises DataError."""
    config = _config(path)
    layers, heads, tokens, width = (
        _size(config, key)
        for key in ("num_layers", "num_attention_heads", "num_virtual_tokens", "token_dim")
    )
    require_small_header(path / WEIGHTS)
    try:
        with safe_open(path / WEIGHTS, framework="pt") as opened:
            names = list(opened.keys())
            if names != [TENSOR]:
                listing = ", ".join(names[:5]) or "none"
                raise DataError(f"such an adapter holds one tensor {TENSOR}: got {listing}")
            metadata = opened.metadata() or {}
            rows = opened.get_tensor(TENSOR)
    except (SafetensorError, OSError) as error:
        pickled = f"; {PICKLE} is a pickle and is not read: save it with safe_serialization=True"
        raise DataError(
            f"{path} has no readable {WEIGHTS} ({error})"
            + (pickled if (path / PICKLE).exists() else "; fetch it again")
        ) from error
    if width % heads or tuple(rows.shape) != (tokens, layers * 2 * width):
        raise DataError(
            f"{TENSOR} is {list(rows.shape)}, and {CONFIG} says [{tokens}, {layers} layers * 2 * "
            f"{width}] of {heads} heads; they are of two adapters, or one is damaged"
        )
    kv = kv_of_rows(rows, layers, heads)
    frozen = 0 if config["peft_type"] == PREFIX else _size(config, "num_frozen_tokens", least=0)
    if LABEL in metadata:
        return labelled(kv, metadata[LABEL], frozen)
    return CartridgeFile(
        kv, frozen, Provenance(base=str(config.get("base_model_name_or_path") or ""))
    )


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / CONFIG).read_text())
        kind = config["peft_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} has no readable {CONFIG} ({error}); fetch it again") from error
    if kind not in (KIND, PREFIX):
        raise DataError(
            f"{path} is an adapter of type {kind}; adapters of type {KIND} and {PREFIX} hold keys "
            "and values, and others change the model's own layers or its input: train one of these"
        )
    submodules = config.get("num_transformer_submodules")
    if submodules not in (None, 1):
        raise DataError(f"{path} is an adapter for {submodules} transformers; a cartridge is for 1")
    return dict(config)


def _size(config: dict[str, Any], key: str, least: int = 1) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise DataError(
            f"{CONFIG} says {key}: {value!r}, and a number is needed; save the adapter from the "
            "model that has it, which fills it in"
        )
    return value
