#!/usr/bin/env bash
# wordllama 0.4.0.post1: `WordLlama.load()` wants its tokenizer from a hub although the wheel brings it.
#
# Guess: the wheel has the weights (weights/l2_supercat_256.safetensors) and the tokenizer
# (tokenizers/l2_supercat_tokenizer_config.json), so that load(disable_download=True) works without a network, and the
# embedding of a text without a token is zero or refused.
# Seen 2026-11-30: load(disable_download=True) raises FileNotFoundError for the tokenizer: it is looked for in a folder
# `tokenizer`, and stands in `tokenizers`; without the flag it is downloaded. In a cache folder both are looked for where the
# wheel has them, so load(cache_dir=FOLDER OF THE PACKAGE, disable_download=True) works. embed("", norm=True) is 256 times NaN
# with a RuntimeWarning, and so ranks nothing: every comparison with it is false.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q wordllama==0.4.0.post1 numpy==2.4.6
HOME="$work" "$work/venv/bin/python" - <<'PY'
import warnings
from pathlib import Path

import numpy as np
import wordllama
from wordllama import WordLlama

folder = Path(wordllama.__file__).parent
brought = ["weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"]
assert all((folder / name).is_file() for name in brought), "the wheel brings other files"
try:
    WordLlama.load(disable_download=True)
except FileNotFoundError as error:
    print("load(disable_download=True):", error)
    assert "l2_supercat_tokenizer_config.json" in str(error)
else:
    raise SystemExit("CHANGED: the wheel's own tokenizer is found")
words = WordLlama.load(cache_dir=folder, disable_download=True)
print("load(cache_dir=the package's folder): loads", words.embed(["a"]).shape)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    blank = words.embed([""], norm=True)
print("embed('', norm=True):", np.isnan(blank).sum(), "of", blank.size, "are NaN;", *{w.category.__name__ for w in seen})
assert np.isnan(blank).all(), "CHANGED: the embedding of an empty text is a number"
PY
