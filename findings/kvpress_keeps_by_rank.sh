#!/usr/bin/env bash
# kvpress 0.5.5 (transformers 5.2.0, torch 2.13.0): what a press keeps stands in the cache in the order of its scores.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
"$work/venv/bin/python" - <<'PY'
import torch
from kvpress import ComposedPress, KnormPress, StreamingLLMPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.5,
)
model = LlamaForCausalLM(config).eval()
context = torch.randint(64, (1, 64), generator=torch.Generator().manual_seed(1))


def cache_of(press=None):
    cache = DynamicCache()
    with torch.no_grad():
        if press is None:
            model(context, past_key_values=cache)
        else:
            with press(model):
                model(context, past_key_values=cache)
    return cache.layers[0].keys[0]  # [heads, entries, 8]


def places(keys, whole):
    """Return of each head the position of each kept key among all."""
    return [[int((head == key).all(-1).nonzero()[0, 0]) for key in kept] for head, kept in zip(whole, keys)]


whole = cache_of()
for name, press in {
    "KnormPress(0.5)": KnormPress(0.5),
    "StreamingLLMPress(0.5)": StreamingLLMPress(0.5, n_sink=4),
    "both": ComposedPress([KnormPress(0.5), StreamingLLMPress(0.5, n_sink=4)]),
}.items():
    print(name, places(cache_of(press), whole)[0], len(set(places(cache_of(press), whole)[0])))
PY
