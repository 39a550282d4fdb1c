"""Make a tokenizer out of a GGUF file's tokens: byte-level pairs, or SentencePiece's pairs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from cartridge_forge.plugins.library.base_models.gguf_file import GgufFile
from cartridge_forge.protocols.errors import DataError

# Kinds of token: CONTROL is never text, USER_DEFINED is never part of another token.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # what SentencePiece writes for a space
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = "llama-bpe"
SMOLLM = "smollm"  # each digit by itself, then the words of GPT-2
SPLITS = {LLAMA3: WORDS % "{1,3}", "qwen2": WORDS % "", "tekken": TEKKEN}
PRETOKENIZERS = (SMOLLM, *SPLITS)
WHOLE_WORDS = (LLAMA3, "tekken")  # a word that is a token is not put together from pairs
# Mistral's third tokenizer puts a space before a text's first word alone, the older ones before
# each text after a special token.
MISTRAL_3 = "[INST]"


def gguf_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any], dict[str, int]]:
    """Return the tokenizer, its tokenizer_config.json, and the special ids of config.json.

    Without a chat template in the file, as base models have none, the config has none. Raises
    DataError for another kind of tokenizer than SentencePiece's and those of `PRETOKENIZERS`.
    """
    model = file.required("tokenizer.ggml.model")
    kind = file.field("tokenizer.ggml.pre", "")
    builds = KINDS.get(model)
    if builds is None or (model == "gpt2" and kind not in PRETOKENIZERS):
        raise DataError(
            f"{file.path} has a tokenizer of kind {model!r}, {kind!r}; of byte-level ones "
            f"{', '.join(PRETOKENIZERS)} are known, and SentencePiece's pairs ('llama'); give the "
            "model's own directory or hub id"
        )
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    kinds: list[int] = file.field("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    while kinds[-1] == UNUSED and re.fullmatch(r"\[PAD\d+\]", tokens[-1]):
        # llama.cpp's names of embeddings beyond the tokenizer: no text has them.
        tokens, kinds = tokens[:-1], kinds[:-1]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    built = builds(file, vocabulary, kinds)
    ids = _special_ids(file)
    named = set(ids.values())
    special = [k in (CONTROL, UNKNOWN) or i in named for i, k in enumerate(kinds)]
    added = [
        AddedToken(token, special=special[i], normalized=False)
        for i, token in enumerate(tokens)
        if special[i] or kinds[i] == USER_DEFINED
    ]
    built.add_tokens(added)  # at once: each call indexes all of them anew
    begins = file.field("tokenizer.ggml.add_bos_token", model == "llama" or kind == LLAMA3)
    if begins and "bos_token_id" in ids:
        bos = tokens[ids["bos_token_id"]]
        built.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, ids["bos_token_id"])],
        )  # fmt: skip
    template = file.field("tokenizer.chat_template")
    config = {
        "tokenizer_class": "TokenizersBackend",
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.fact("context_length")),
        **{key.removesuffix("_id"): tokens[i] for key, i in ids.items()},
    }
    return built, config, ids


def _byte_level(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> Tokenizer:
    kind = file.required("tokenizer.ggml.pre")
    merges = [tuple(merge.split(" ", 1)) for merge in file.required("tokenizer.ggml.merges")]
    whole_words = kind in WHOLE_WORDS
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=whole_words))
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if kind == SMOLLM:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(SPLITS[kind]), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == SMOLLM)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, words])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, vocabulary: dict[str, int], kinds: list[int]) -> Tokenizer:
    """Return SentencePiece's pairs: of two neighbours those are joined first whose joined piece has
    the highest score. A file has scores and no pairs."""
    scores: list[float] = file.required("tokenizer.ggml.scores")
    unknown = file.field("tokenizer.ggml.unknown_token_id")
    pairs: list[tuple[float, int, int, int, tuple[str, str]]] = []
    for piece, i in vocabulary.items():
        if kinds[i] != NORMAL:
            continue
        for at in range(1, len(piece)):
            first, right = vocabulary.get(piece[:at]), vocabulary.get(piece[at:])
            if first is not None and right is not None and kinds[first] == kinds[right] == NORMAL:
                pairs.append((-scores[i], i, first, right, (piece[:at], piece[at:])))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=[pair for *_, pair in sorted(pairs)], byte_fallback=True,
            fuse_unk=True, unk_token=None if unknown is None else list(vocabulary)[unknown],
        )
    )  # fmt: skip
    spaced = bool(file.field("tokenizer.ggml.add_space_prefix", True))
    third = spaced and kinds[vocabulary.get(MISTRAL_3, 0)] == CONTROL
    if third:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepended = [normalizers.Prepend(SPACE)] if spaced else []
        tokenizer.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(),
        *([decoders.Strip(" ", 1, 0)] if spaced else []),
    ])  # fmt: skip
    return tokenizer


KINDS: Mapping[str, Callable[[GgufFile, dict[str, int], list[int]], Tokenizer]] = {
    "gpt2": _byte_level, "llama": _sentencepiece,
}  # fmt: skip


def _special_ids(file: GgufFile) -> dict[str, int]:
    """Return the special ids by their keys in config.json. The end of a turn, where the file has
    one, is the end of a chat's response."""
    keys = {
        "bos_token_id": ("bos",), "eos_token_id": ("eot", "eos"), "unk_token_id": ("unknown",),
        "pad_token_id": ("padding",),
    }  # fmt: skip
    ids = {}
    for key, names in keys.items():
        values = [file.field(f"tokenizer.ggml.{name}_token_id") for name in names]
        values_set = [int(value) for value in values if value is not None]
        if values_set:
            ids[key] = values_set[0]
    if "eos_token_id" not in ids:
        raise DataError(f"{file.path} does not say which token ends a response (eos_token_id)")
    return ids
