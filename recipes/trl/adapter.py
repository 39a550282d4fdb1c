"""Load a CARTRIDGE adapter to be trained further."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import CartridgeConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights

TENSOR = "prompt_embeddings"


def trainable(base: Any, folder: str | Path) -> PeftModel:
    """Return a transformers model over the adapter in a folder, all but its frozen tokens
    trainable. PEFT's own `from_pretrained(is_trainable=True)` refuses adapters of this kind."""
    config = CartridgeConfig.from_pretrained(str(folder))
    config.inference_mode = False
    model: PeftModel = get_peft_model(base, config)
    weights = load_peft_weights(str(folder), device="cpu")
    model.prompt_encoder["default"].load_prompt_embeddings(weights[TENSOR])
    return model
