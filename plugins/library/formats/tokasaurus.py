"""Read and write the directory that Tokasaurus (branch geoff/cartridges) loads as source `local`.

    ./cartridges/NAME/cartridge.pt    HazyResearch's file
    ./cartridges/NAME/config.yaml     kv_cache_initializer.max_tokens: P; the model's name

Tokasaurus reserves ceil(max_tokens / 16) blocks, cuts the cartridge to whole blocks of 16 with a
warning, and fails where the numbers then differ: it serves no P that is not a multiple of 16.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from cartridge_forge.plugins.library.formats import hazyresearch
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.protocols.errors import DataError

FILE, CONFIG = "cartridge.pt", "config.yaml"
BLOCK = 16
_BROKEN = (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError)


class TrainingConfigLoader(yaml.SafeLoader):
    """Load configs that W&B wrote during training, which have tuples; builds no other object."""


def _tuple(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> list[Any]:
    return loader.construct_sequence(node, deep=True)


TrainingConfigLoader.add_constructor("tag:yaml.org,2002:python/tuple", _tuple)


def save(cartridge: CartridgeFile, folder: Path) -> None:
    """Write a cartridge's directory at a path that is free."""
    config: dict[str, Any] = {
        "kv_cache_initializer": {
            "max_tokens": cartridge.tokens,
            "num_frozen_tokens": cartridge.frozen,
        }
    }
    if cartridge.facts.base:
        config["model"] = {"pretrained_model_name_or_path": cartridge.facts.base}
    folder.mkdir(mode=0o700)  # it is as confidential as its document
    hazyresearch.save(cartridge, folder / FILE)
    (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False))


def read(path: Path) -> CartridgeFile:
    """Read a cartridge's directory. Raises DataError."""
    try:
        config = yaml.load((path / CONFIG).read_text(), TrainingConfigLoader)
        tokens = _stated(config, "kv_cache_initializer", "max_tokens")
        base = _stated(config, "model", "pretrained_model_name_or_path")
    except _BROKEN as error:
        raise DataError(f"{path} has no readable {CONFIG} ({error}); fetch it again") from error
    if not (path / FILE).is_file():
        raise DataError(f"{path} has no {FILE}; fetch it again")
    cartridge = hazyresearch.read(path / FILE)
    if tokens != cartridge.tokens:
        raise DataError(
            f"{CONFIG} says max_tokens: {tokens}, and {FILE} holds {cartridge.tokens} tokens; they "
            "are of two cartridges, or one is damaged"
        )
    facts = cartridge.facts
    if facts.base or not isinstance(base, str):
        return cartridge
    return replace(cartridge, facts=replace(facts, base=base))


def unservable(cartridge: CartridgeFile) -> str | None:
    """Return why Tokasaurus would not serve the cartridge, or None."""
    if cartridge.tokens % BLOCK == 0:
        return None
    return (
        f"Tokasaurus serves whole blocks of {BLOCK} tokens and fails on {cartridge.tokens}; train "
        f"with cartridge.tokens {cartridge.tokens // BLOCK * BLOCK or BLOCK}"
    )


def _stated(config: Any, section: str, key: str) -> Any:
    """Return a value where training writes it, or below `value`, where W&B puts it."""
    plain = config.get(section) or {}
    return plain.get(key, (plain.get("value") or {}).get(key))
