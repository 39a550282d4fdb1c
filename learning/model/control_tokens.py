"""Tell which tokens of a tokenizer are no text, which end a response, and which ids have no token.

`tokenizer_config.json` names some special tokens, and `tokenizer.json` alone marks others: the
headers of Llama 3, and all tokens of a chat in files converted from GGUF. The end of a response is
the tokenizer's `eos_token`, and every token that `generation_config.json` lists: of Gemma, Phi-3
and GLM-4 the first is not the one that ends a turn.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from cartridge_forge.learning.model.hub import model_files
from cartridge_forge.protocols.errors import DataError

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


@cache
def token_count(path: str) -> int | None:
    """Return the number of ids that the tokenizer in a model's directory has tokens for, beyond
    which embeddings are padding; None where it has no tokenizer.json. It is read without loading a
    tokenizer, for processes that need none."""
    files = Path(path) / "tokenizer.json", Path(path) / "tokenizer_config.json"
    if not files[0].is_file():
        return None
    from tokenizers import Tokenizer

    vocabulary: dict[str, int] = Tokenizer.from_file(str(files[0])).get_vocab(
        with_added_tokens=True
    )
    config = json.loads(files[1].read_bytes()) if files[1].is_file() else {}
    added = (int(id) for id in config.get("added_tokens_decoder", {}))
    count = 1 + max((*vocabulary.values(), *added), default=-1)
    # Special tokens that are named there alone get the next ids.
    token_lists = [config.get("extra_special_tokens"), config.get("additional_special_tokens")]
    token_lists += [[value] for key, value in config.items() if key.endswith("_token")]
    named = {_content(token) for tokens in token_lists for token in _listed(tokens)}
    decoder = config.get("added_tokens_decoder", {}).values()
    return count + len(named - {""} - set(vocabulary) - {_content(token) for token in decoder})


def _listed(tokens: Any) -> Iterable[Any]:
    return tokens.values() if isinstance(tokens, dict) else tokens or ()


def _content(token: Any) -> str:
    """Return the text of a token as tokenizer_config.json gives it, "" for what is none."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def vocabulary_of(model: Path) -> int | None:
    """Return how many token ids a model's embeddings have by its config.json, which its tokenizer
    may have more or fewer of; None where no config is here, or it does not say."""
    try:
        config = json.loads((model / "config.json").read_bytes())
        stated = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    except (OSError, ValueError, AttributeError):
        return None
    return stated if isinstance(stated, int) else None
