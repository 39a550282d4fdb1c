#!/usr/bin/env bash
# transformers 5.19.0 (torch 2.13.0): a model loaded in float64 computes its norms and rotary embedding in float32.
#
# Guess: `from_pretrained(..., dtype=torch.float64)` gives a reference that is exact to 1e-12, by which the rounding
# of a float32 pass can be told.
# Seen 2026-11-29: a Llama norm of float64 input is off the formula by about 1e-8, and the angles' cosines come back
# with the digits of float32, for both cast to float32 inside. A model of 24 layers stays about 1e-4 nats off the
# exact log-probabilities, as far as a float32 pass is. A reference must be written out.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0
"$work/venv/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
)).double()
x = torch.randn(5, 32, dtype=torch.float64)
exact = x / (x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps).sqrt()
norm = (model.model.norm(x) - exact).abs().max().item()
positions = torch.arange(1000, 1005)[None]
cosines, _ = model.model.rotary_emb(x[None], positions)
size = 8
frequencies = 10000.0 ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
angles = (positions[0, :, None] * frequencies).cos()
rope = (cosines[0, :, : size // 2] - angles).abs().max().item()
print(f"dtype {model.model.norm(x).dtype}: norm off by {norm:.1e}, cosines off by {rope:.1e}")
assert 1e-9 < norm < 1e-5 and 1e-9 < rope < 1e-2
PY
