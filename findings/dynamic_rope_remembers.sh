#!/usr/bin/env bash
# transformers 5.19.0 (torch 2.13.0): a model with the rotary embedding `dynamic` answers a text otherwise after it
# has read a longer one, and has no length at which it forgets.
#
# Guess: a forward pass without a cache is a function of its input.
# Seen 2026-11-29: with max_position_embeddings 8, the logits of 20 tokens differ by more than 0.01 between a fresh
# model and the same model that has read 48 tokens before: the frequencies grow with the longest text seen and stay
# there until a text of fewer than 8 tokens comes. Batches of one server depend on what it served before, and a check
# of a model must read its texts from short to long.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0
"$work/venv/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=8,
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    initializer_range=0.5,
)
model = LlamaForCausalLM(config).eval()
short, longer, tiny = torch.arange(20)[None], torch.arange(48)[None], torch.arange(7)[None]
with torch.no_grad():
    fresh = model(short, use_cache=False).logits
    model(longer, use_cache=False)
    after = model(short, use_cache=False).logits
    model(tiny, use_cache=False)
    again = model(short, use_cache=False).logits
moved, restored = ((x - fresh).abs().max().item() for x in (after, again))
print(f"20 tokens after 48 others: logits moved by {moved:.3g}; after 7 more: by {restored:.3g}")
assert moved > 0.01 and restored < 1e-4
PY
