"""Make a tokenizer out of a GGUF file's tokens and merges: byte-level byte-pair encoding."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from protocols.errors import DataError
from registry.base_models.gguf_file import GgufFile

CONTROL, USER_DEFINED = 3, 4  # kinds of token: the first is never text
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS = {"llama-bpe": "{1,3}", "qwen2": ""}  # most digits that make one word
SMOLLM = "smollm"  # each digit by itself, then the words of GPT-2
PRETOKENIZERS = (SMOLLM, *DIGITS)


def gguf_tokenizer(file: GgufFile) -> tuple[Tokenizer, dict[str, Any], dict[str, int]]:
    """Return the tokenizer, its tokenizer_config.json, and the special ids of config.json.

    Raises DataError for another kind of tokenizer than those of `PRETOKENIZERS`.
    """
    model, kind = file.required("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre", "")
    if model != "gpt2" or kind not in PRETOKENIZERS:
        raise DataError(
            f"{file.path} has a tokenizer of kind {model!r}, {kind!r}; of byte-level ones "
            f"{', '.join(PRETOKENIZERS)} are known; give the model's own directory or hub id"
        )
    template = file.field("tokenizer.chat_template")
    if not template:
        raise DataError(
            f"{file.path} has no chat template, so it is no instruct model; take one that is"
        )
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    kinds: list[int] = file.field("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in file.required("tokenizer.ggml.merges")]
    made = Tokenizer(models.BPE(
        vocab={token: i for i, token in enumerate(tokens)}, merges=merges,
        ignore_merges=kind == "llama-bpe",
    ))  # fmt: skip
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    made.pre_tokenizer = _pre_tokenizer(kind)
    made.decoder = decoders.ByteLevel()
    ids = _special_ids(file)
    named = set(ids.values())
    for i, token in enumerate(tokens):
        if kinds[i] == CONTROL or i in named:
            made.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kinds[i] == USER_DEFINED:
            made.add_tokens([AddedToken(token, normalized=False)])
    if file.field("tokenizer.ggml.add_bos_token", False) and "bos_token_id" in ids:
        bos = tokens[ids["bos_token_id"]]
        made.post_processor = TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, ids["bos_token_id"])],
        )  # fmt: skip
    config = {
        "tokenizer_class": "TokenizersBackend",
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(file.fact("context_length")),
        **{key.removesuffix("_id"): tokens[i] for key, i in ids.items()},
    }
    return made, config, ids


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    if kind == SMOLLM:
        first: Any = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(WORDS % DIGITS[kind]), "isolated")
    by_word = kind == SMOLLM
    return pre_tokenizers.Sequence(
        [first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_word)]
    )


def _special_ids(file: GgufFile) -> dict[str, int]:
    """Return the special ids by their keys in config.json. The end of a turn, where the file has
    one, is the end of a chat's response."""
    keys = {
        "bos_token_id": ("bos",), "eos_token_id": ("eot", "eos"), "unk_token_id": ("unknown",),
        "pad_token_id": ("padding",),
    }  # fmt: skip
    found = {}
    for key, names in keys.items():
        values = [file.field(f"tokenizer.ggml.{name}_token_id") for name in names]
        given = [int(value) for value in values if value is not None]
        if given:
            found[key] = given[0]
    if "eos_token_id" not in found:
        raise DataError(f"{file.path} does not say which token ends a response (eos_token_id)")
    return found
