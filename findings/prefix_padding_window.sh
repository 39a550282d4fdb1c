#!/usr/bin/env bash
# peft 0.21.2 (transformers 5.19.0, torch 2.13.0): in a model with a sliding window, how much of a learned prefix a prompt
# sees depends on the padding that its batch gives it.
#
# Guess: padding on the left changes no answer: the mask hides it, and generate() counts positions without it.
# Seen 2026-11-30: the padding stands between the prefix and the prompt, and the window counts places, hidden ones too. So
# each padded place pushes one entry of the prefix out of the window. Alone, a prompt of 4 tokens answers by other tokens
# than as the shorter row of a batch, with prefix tuning and with CARTRIDGE alike. Without a window both answer alike.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 peft==0.21.2
"$work/venv/bin/python" - 2>/dev/null <<'PY'
import peft
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

sizes = dict(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, initializer_range=0.5, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)
models = {
    "window": (MistralForCausalLM, MistralConfig(sliding_window=8, **sizes)),
    "no window": (LlamaForCausalLM, LlamaConfig(**sizes)),
}
kinds = {
    "prefix tuning": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=12),
    "CARTRIDGE": peft.CartridgeConfig(task_type="CAUSAL_LM", num_virtual_tokens=12, num_frozen_tokens=0),
}
alone = torch.tensor([[5, 9, 11, 7]])
batch = torch.tensor([[0, 0, 0, 5, 9, 11, 7], [3, 4, 6, 8, 5, 9, 11]])
equal = {}
for model_name, (model_class, config) in models.items():
    for kind, adapter in kinds.items():
        torch.manual_seed(0)
        model = peft.get_peft_model(model_class(config), adapter).eval()
        options = dict(do_sample=False, min_new_tokens=8, max_new_tokens=8)
        one = model.generate(input_ids=alone, attention_mask=torch.ones_like(alone), **options)[0, 4:]
        two = model.generate(input_ids=batch, attention_mask=(batch != 0).long(), **options)[0, 7:]
        equal[model_name, kind] = torch.equal(one, two)
        print(f"{model_name}, {kind}: alone {one.tolist()}, in a batch {two.tolist()}")
assert equal == {(m, k): m == "no window" for m in models for k in kinds}
PY
