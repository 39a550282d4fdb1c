"""Describe the base model of a cartridge (shape, RoPE, hash) and check that a cartridge fits it, by
its config and by its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cartridge_forge.plugins.library.formats.cartridge_file import (
    POST_ROPE,
    CartridgeFile,
    Provenance,
)
from cartridge_forge.protocols.errors import DataError

# Keys of a config.json that say how it was saved and not what the model computes.
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")


@dataclass(frozen=True)
class BaseModelInfo:
    """Describe what cartridges must fit in a model: `BaseModelInfo(4, 2, 32, 4096, "9f..")`.

    `context` is the most positions that the model was made for, `config_sha256` the hash of its
    config.json, `rope` its rotation (empty where the config has none), and `name` its usual name.
    """

    layers: int
    kv_heads: int
    head_dim: int
    context: int
    config_sha256: str
    rope: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""


def read_base(model: Path) -> BaseModelInfo:
    """Read the shape in a model's config.json. Raises DataError where it states none."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        heads = config["num_attention_heads"]
        return BaseModelInfo(
            layers=config["num_hidden_layers"],
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            context=config["max_position_embeddings"],
            config_sha256=config_hash(config),
            rope=rope_of(config),
            name=model_name(str(model)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"the model at {model} has no config.json that says its shape ({error!r}); give a "
            "directory with a Llama-like model's config.json and *.safetensors"
        ) from error


def partial_layer(model: Path) -> tuple[int, str] | None:
    """Return the first layer of a model that does not keep all positions, and the name of what
    transformers keeps for it; None where all layers do. Raises DataError for no model."""
    from transformers import AutoConfig, DynamicCache  # slow: see learning.model
    from transformers.cache_utils import DynamicLayer

    try:
        layers = DynamicCache(config=AutoConfig.from_pretrained(str(model))).layers
    except (OSError, ValueError) as error:
        raise DataError(
            f"the kinds of layers of {model} are not known: {str(error).splitlines()[0]}"
        ) from error
    for number, layer in enumerate(layers):
        if type(layer) is not DynamicLayer:
            return number, type(layer).__name__
    return None


def model_name(path: str) -> str:
    """Return a model's usual name: the name of a directory, or a hub id as it is."""
    local = Path(path)
    return local.absolute().name if local.is_absolute() or local.is_dir() else path


def config_hash(config: Mapping[str, Any]) -> str:
    stable = {k: v for k, v in config.items() if k not in VOLATILE}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotation's base and scaling in one spelling for all configs; {} without rotation.

    Old configs have `rope_theta` and `rope_scaling {type or rope_type, factor, ...}`. New ones have
    all of it in `rope_parameters`; where that differs by type of layer, it is returned unchanged.
    """
    stated = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if any(isinstance(value, Mapping) for value in stated.values()):
        return stated
    theta = stated.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        return {}
    kind = [stated.pop(key) for key in ("rope_type", "type") if key in stated]
    return {"rope_theta": float(theta), "rope_type": kind[0] if kind else "default", **stated}


def misfits(cartridge: CartridgeFile, base: BaseModelInfo) -> list[str]:
    """Return the reasons why the cartridge cannot be a prefix of the model; empty where it fits."""
    return misfits_of(tuple(cartridge.kv.shape), cartridge.facts, base)


def misfits_of(shape: Sequence[int], facts: Provenance, base: BaseModelInfo) -> list[str]:
    """Return the same for a cartridge of `shape` [L, 2, H_kv, P, D], whose numbers are not read."""
    reasons = []
    if facts.keys != POST_ROPE:
        reasons.append(f"its keys are {facts.keys}, and they are read as post-rope: rotate them")
    if facts.first_position != 0:
        reasons.append(
            f"it begins at position {facts.first_position}, and prompts are read as if it began at "
            "0: train it there"
        )
    if facts.rope and base.rope and dict(facts.rope) != dict(base.rope):
        reasons.append(
            f"its keys are rotated by {_shown(facts.rope)}, and the model's by "
            f"{_shown(base.rope)}: train it on this model"
        )
    tokens = shape[3]
    if tuple(shape) != (base.layers, 2, base.kv_heads, tokens, base.head_dim):
        reasons.append(
            f"a cartridge for this model has the shape [{base.layers}, 2, {base.kv_heads}, P, "
            f"{base.head_dim}]: got {list(shape)}; was it trained for another base?"
        )
    elif tokens + 2 > base.context:
        reasons.append(
            f"a cartridge of {tokens} tokens leaves none of the model's {base.context} "
            "positions for a prompt; train a shorter one"
        )
    elif facts.config_sha256 not in ("", base.config_sha256):
        reasons.append(
            f"the cartridge was trained for another base model (config {facts.config_sha256[:12]}, "
            f"this one is {base.config_sha256[:12]}); use that one, or train it on this one"
        )
    return reasons


def require_fit(cartridge: CartridgeFile, base: BaseModelInfo) -> None:
    """Raise DataError with every reason of `misfits`."""
    reasons = misfits(cartridge, base)
    if reasons:
        raise DataError("; ".join(reasons))


def made_for(cartridge: CartridgeFile, base: BaseModelInfo) -> CartridgeFile:
    """Return the cartridge with missing facts taken from the model; call after `require_fit`."""
    facts = cartridge.facts
    return replace(
        cartridge,
        facts=replace(
            facts,
            base=facts.base or base.name,
            config_sha256=facts.config_sha256 or base.config_sha256,
            rope=facts.rope or dict(base.rope),
        ),
    )


def other_weights(
    cartridge: CartridgeFile, model: Path, known_hashes: Mapping[str, str] | None = None
) -> list[str]:
    """Return why the model's weights are not those that the cartridge was trained with; empty where
    they are, or where the cartridge has no hash of them. Only its weights tell two models of one
    config apart: it is loaded unless `known_hashes` has its hash by dtype. Raises DataError where
    there is no model."""
    facts = cartridge.facts
    if not facts.weights_sha256 or not facts.weights_dtype:
        return []
    weights_hash = (known_hashes or {}).get(facts.weights_dtype) or _loaded_hash(
        model, facts.weights_dtype
    )
    if weights_hash == facts.weights_sha256:
        return []
    return [
        f"the cartridge was trained with other weights ({facts.weights_sha256[:12]}, these are "
        f"{weights_hash[:12]}); use those, or train it on these"
    ]


def _loaded_hash(model: Path, dtype: str) -> str:
    from transformers.utils.logging import disable_progress_bar  # slow: see learning.model

    from cartridge_forge.learning.model.loading import base_hash, load_model

    disable_progress_bar()
    return base_hash(load_model(str(model), dtype))


def _shown(rope: Mapping[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in sorted(rope.items()))
