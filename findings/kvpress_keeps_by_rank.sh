#!/usr/bin/env bash
# kvpress 0.5.5 (transformers 5.2.0, torch 2.13.0): what a press keeps stands in the cache in the order of its scores, and a
# second press takes that order for the text's.
#
# Guess: kept entries stay in the order of their positions, so that ComposedPress([KnormPress, StreamingLLMPress]) keeps, of
# what the first press left, the first entries of the text and the latest ones.
# Seen 2026-11-30: after KnormPress(0.5) over 64 tokens the 32 entries stand from the highest score to the lowest. The
# StreamingLLMPress(0.5) behind it keeps places 0 to 3 and the last 12 of that ranking: the four best and the twelve worst
# entries of the first press, wherever they were in the text. The 16 best but four are gone.
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
rank = KnormPress(0.5)
latest = StreamingLLMPress(0.5, n_sink=4)
first = places(cache_of(rank), whole)
second = places(cache_of(ComposedPress([KnormPress(0.5), latest])), whole)
for head, (kept, after) in enumerate(zip(first, second)):
    ends = set(kept[:4] + kept[-12:])
    by_position = set(sorted(kept)[:4] + sorted(kept)[-12:])
    print(f"head {head}: KnormPress keeps {kept}")
    print(f"  StreamingLLMPress behind it {sorted(after)}; by position it were {sorted(by_position)}")
    assert len(kept) == 32 and kept != sorted(kept)
    assert set(after) == ends != by_position
PY
