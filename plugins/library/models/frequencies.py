"""Tell how a model turns keys by their position, from its config alone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from cartridge_forge.learning.decoder import KeyFrequencies, half_split, rope_frequencies
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.plugins.library.models.verdicts import kept_verdict
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.plugins import resolve


@cache
def frequencies_of(path: str) -> KeyFrequencies:
    """Return `LanguageModel.frequencies` of the model in this directory (or of this hub id) from
    its config alone, for processes without the model. Raises DataError as that does, and for an
    unknown model."""
    verdict = kept_verdict(path)
    if verdict is not None and verdict.unmoved:
        raise DataError(verdict.unmoved)
    file = Path(path) / "config.json"
    config = decoder_config(json.loads(file.read_bytes())) if file.is_file() else None
    if config is not None:
        return half_split(rope_frequencies(config.rope, config.head_dim), config.head_dim)
    by_transformers = resolve("hooks", "other_frequencies")
    try:
        frequencies: KeyFrequencies = by_transformers(path)
        return frequencies
    except AttributeError as error:  # of a rotary embedding that is made in another way
        raise DataError(
            f"keys of the model {path!r} cannot be moved to other positions: its rotary embedding "
            f"is not known ({error}); use one cartridge before a prompt"
        ) from error
