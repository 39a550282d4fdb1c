"""Read the shape of a Llama-like model from its config.json or from the spec."""

from __future__ import annotations

import json
from pathlib import Path

from protocols.errors import SpecError
from protocols.spec.sections import ModelSpec, ShapeSpec

VALUE_BYTES = {"float32": 4, "bfloat16": 2}


def model_shape(model: ModelSpec) -> ShapeSpec | None:
    """Return the shape in config.json, else `model.shape`. Raises SpecError for other models."""
    path = Path(model.path) / "config.json"
    if not path.is_file():
        return model.shape
    try:
        config = json.loads(path.read_bytes())
        heads = config["num_attention_heads"]
        return ShapeSpec(
            layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["intermediate_size"],
            vocab=config["vocab_size"],
        )
    except (ValueError, KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise SpecError(
            f"{path} is not the config of a Llama-like model ({type(error).__name__}: "
            f"{str(error).splitlines()[0]}); set model.path to another directory"
        ) from error
