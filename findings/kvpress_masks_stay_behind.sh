#!/usr/bin/env bash
# kvpress 0.5.5 (transformers 5.2.0, torch 2.13.0): a cache that a press compressed by head is the whole cache; what was
# pruned is noted on the model's modules, and does not go with the cache.
#
# Guess: the cache that a press leaves is the compressed one, as its compression_ratio says: it can be stored, measured
# and read by another process with equal weights.
# Seen 2026-11-30: after KnormPress(0.5) over 64 tokens the cache has 32 entries. After AdaKVPress(KnormPress(0.5)) it has
# all 64, which also are the bytes of the uncompressed cache, and the model answers otherwise than before, for it
# overwrites the keys at pruned places in every pass. An equal model that is given the same cache answers as over the
# uncompressed one, to the bit. So sizes by the cache's tensors, and a comparison that stores caches, see no compression.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
"$work/venv/bin/python" - <<'PY'
import copy
import torch
from kvpress import AdaKVPress, KnormPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.5,
)
model = LlamaForCausalLM(config).eval()
other = copy.deepcopy(model)  # equal weights, as in another process
context, question = torch.arange(64)[None], torch.tensor([[5, 9]])


def compressed(press):
    cache = DynamicCache()
    with press(model):
        model(context, past_key_values=cache)
    return cache


def answer(model, cache):
    places = torch.arange(64, 66)[None]
    return model(question, past_key_values=copy.deepcopy(cache), position_ids=places).logits


with torch.no_grad():
    whole = DynamicCache()
    other(context, past_key_values=whole)
    halved = compressed(KnormPress(0.5)).get_seq_length()
    cache = compressed(AdaKVPress(KnormPress(0.5)))
    same_keys = all(torch.equal(a.keys, b.keys) for a, b in zip(cache.layers, whole.layers))
    here, elsewhere, uncompressed = answer(model, cache), answer(other, cache), answer(other, whole)
moved = (here - uncompressed).abs().max().item()
undone = torch.equal(elsewhere, uncompressed)
print(f"entries of 64: {halved} after KnormPress(0.5), {cache.get_seq_length()} after AdaKVPress")
print(f"its keys are the uncompressed ones: {same_keys}; logits moved by {moved:.3g} in the pressed model, "
      f"equal to the uncompressed in an equal one: {undone}")
assert halved == 32 and cache.get_seq_length() == 64 and same_keys
assert moved > 0.01 and undone
PY
