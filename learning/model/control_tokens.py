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

CONFIG = "config.json"


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the tokens that are no text, by their content."""
    named = dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return named | {token.content: id for id, token in added.items() if token.special}


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
