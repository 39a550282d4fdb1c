"""Tell which tokens of a tokenizer are no text, which end a response, and which ids have no token.

`tokenizer_config.json` names some special tokens, and `tokenizer.json` alone marks others: the
headers of Llama 3, and all tokens of a chat in files converted from GGUF. The end of a response is
the tokenizer's `eos_token`, and every token that `generation_config.json` lists: of Gemma, Phi-3
and GLM-4 the first is not the one that ends a turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from protocols.errors import DataError

GENERATION, CONFIG = "generation_config.json", "config.json"


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are no text, by their content."""
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {token.content: id for id, token in added.items() if token.special}


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
        found = [_eos(Path(path) / name) for name in (GENERATION, CONFIG)]
        return next(filter(None, found), ())
    from transformers import GenerationConfig

    try:
        return _ids(GenerationConfig.from_pretrained(path).eos_token_id)
    except OSError:  # a model without this file
        return ()


def _eos(file: Path) -> tuple[int | None, ...]:
    if not file.is_file():
        return ()
    try:
        return _ids(json.loads(file.read_bytes()).get("eos_token_id"))
    except (ValueError, AttributeError) as error:
        raise DataError(f"{file} is no JSON of a model ({error}); restore it") from error


def _ids(given: int | list[int] | None) -> tuple[int | None, ...]:
    return tuple(given) if isinstance(given, list) else (given,) if given is not None else ()
