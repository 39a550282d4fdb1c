"""Check whether a model's weights are those that a cartridge was trained with."""

from __future__ import annotations

from pathlib import Path

from learning.model.loading import base_hash, load_model
from registry.formats.cartridge_file import CartridgeFile


def other_weights(cartridge: CartridgeFile, model: Path) -> list[str]:
    """Return why the model's weights are not those that the cartridge was trained with; empty where
    they are, or where the cartridge has no hash of them. Loads the model, because only its weights
    tell two models of one config apart. Raises DataError where there is no model."""
    facts = cartridge.facts
    if not facts.weights_sha256 or not facts.weights_dtype:
        return []
    from transformers.utils.logging import disable_progress_bar  # slow: see learning.model

    disable_progress_bar()
    found = base_hash(load_model(str(model), facts.weights_dtype))
    if found == facts.weights_sha256:
        return []
    return [
        f"the cartridge was trained with other weights ({facts.weights_sha256[:12]}, these are "
        f"{found[:12]}); use those, or train it on these"
    ]
