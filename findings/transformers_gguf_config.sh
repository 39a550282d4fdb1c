#!/usr/bin/env bash
# transformers 5.19.0 (gguf 0.19.0): the config that `gguf_file=` reads leaves out fields that the file states, without
# a warning, and other numbers stand in their place.
#
# Guess: a field of the GGUF specification that changes the forward pass is read, or the file is refused.
# Seen 2026-11-30: of files written by gguf's own writer,
#   llama    `rope.scaling.type: linear, factor: 4`  -> rope_type "default": positions are not divided
#   gemma3   the same with a factor of 8             -> "default" for the layers of full attention
#   qwen3    `attention.key_length: 32`              -> head_dim 128, the default of the class
#   llama    `attention.sliding_window: 8`           -> no window
# Models of 32k tokens whose ropes are scaled so answer from other positions; a Qwen3 with such heads fails in its first
# pass. We read the config ourselves and refuse a field that we do not compute.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.19.0 gguf==0.19.0
cd "$work"
"$work/venv/bin/python" - <<'PY'
import warnings
from pathlib import Path

import gguf
from transformers import AutoConfig

def config(name, arch, fields):
    writer = gguf.GGUFWriter(f"{name}.gguf", arch)
    writer.add_context_length(256)
    writer.add_embedding_length(64)
    writer.add_block_count(8)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    writer.add_vocab_size(400)
    fields(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return AutoConfig.from_pretrained(Path.cwd(), gguf_file=f"{name}.gguf")

def linear(factor):
    def fields(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    return fields

llama = config("llama", "llama", linear(4.0)).rope_parameters
gemma = config("gemma", "gemma3", linear(8.0)).rope_parameters
qwen = config("qwen", "qwen3", lambda writer: writer.add_key_length(32)).head_dim
window = getattr(config("window", "llama", lambda writer: writer.add_sliding_window(8)), "sliding_window", None)
print(f"llama, factor 4: {llama}")
print(f"gemma3, factor 8: {gemma}")
print(f"qwen3, key_length 32: head_dim {qwen}")
print(f"llama, sliding_window 8: {window}")
assert llama["rope_type"] == "default" and "factor" not in llama
assert gemma["full_attention"]["rope_type"] == "default"
assert qwen == 128
assert window is None
PY
