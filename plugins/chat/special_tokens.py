"""Find the special tokens of a model, and those that end a response, in its files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cartridge_forge.learning.model.control_tokens import CONFIG, special_tokens
from cartridge_forge.learning.model.hub import model_files
from cartridge_forge.protocols.errors import DataError

GENERATION = "generation_config.json"


def special_in(tokenizer: Any, text: str) -> str | None:
    """Return a special token that a text would be read as, None where there is none."""
    return next((token for token in special_tokens(tokenizer) if token in text), None)


def stated_ends(tokenizer: Any) -> frozenset[int]:
    """Return the ids that a model's files say end a response. Raises DataError for a file that is
    not JSON."""
    return frozenset({tokenizer.eos_token_id, *_generation_ends(tokenizer.name_or_path)} - {None})


def _generation_ends(path: str) -> tuple[int | None, ...]:
    """Return the end tokens of generation_config.json; where it has none, those of config.json."""
    if not path:
        return ()
    if Path(path).is_dir():
        ends = [_eos(Path(path) / name) for name in (GENERATION, CONFIG)]
        return next(filter(None, ends), ())
    from transformers import GenerationConfig

    try:
        return _ids(GenerationConfig.from_pretrained(model_files(path)).eos_token_id)
    except OSError:  # a model without this file
        return ()


def _eos(file: Path) -> tuple[int | None, ...]:
    if not file.is_file():
        return ()
    try:
        return _ids(json.loads(file.read_bytes()).get("eos_token_id"))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is no JSON of a model ({error}); restore it") from error


def _ids(ids: int | list[int] | None) -> tuple[int | None, ...]:
    return tuple(ids) if isinstance(ids, list) else (ids,) if ids is not None else ()


def require_text(tokenizer: Any, texts: Iterable[tuple[str, str]], what: str) -> None:
    """Raise DataError where texts, given with their places, would be read as special tokens; it
    says how many. `what` is the plural of what they are."""
    special = special_tokens(tokenizer)
    token_places: dict[str, str] = {}
    for location, text in texts:
        token = next((token for token in special if token in text), None)
        if token is not None:
            token_places.setdefault(location, token)
    if token_places:
        location, token = next(iter(token_places.items()))
        raise DataError(
            f"{len(token_places)} {what} have one of the model's special tokens: "
            f"the first is {location}, "
            f"with {token}; remove it, or leave them out"
        )
