#!/usr/bin/env bash
# llama.cpp b11549 (xllamacpp 2026.10.11549), CPU: with weights, keys and values in float32, flash attention (which is on unless it
# is turned off) computes in half precision.
#
# Guess: `-ctk f32 -ctv f32` and a float32 file make a float32 pass; flash attention is another order of the same sums.
# Seen 2026-11-30: a model of two layers with random float32 weights, one pass over 48 tokens. Against the same pass in float64 the
# ten likeliest tokens' log-probabilities are off by 0.000005 nats without flash attention and by 0.0034 with it.
set -euo pipefail
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q xllamacpp==2026.10.11549 gguf==0.19.0 numpy==2.4.6
cat > "$work/flash.py" <<'PY'
import json
import sys
import urllib.request

import gguf
import numpy as np
import xllamacpp

LAYERS, HEADS, HEAD, HIDDEN, INNER, WORDS = 2, 4, 32, 128, 256, 320
draw = np.random.default_rng(0)


def weight(rows, columns, scale):
    return (draw.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32)


weights = {"token_embd.weight": weight(WORDS, HIDDEN, 3.0), "output.weight": weight(WORDS, HIDDEN, 1.0),
           "output_norm.weight": np.ones(HIDDEN, np.float32)}
for i in range(LAYERS):
    weights |= {f"blk.{i}.attn_{n}.weight": weight(HIDDEN, HIDDEN, s) for n, s in (("q", 2.0), ("k", 2.0), ("v", 4.0), ("output", 4.0))}
    weights |= {f"blk.{i}.ffn_{n}.weight": weight(INNER, HIDDEN, 1.0) for n in ("gate", "up")}
    weights |= {f"blk.{i}.ffn_down.weight": weight(HIDDEN, INNER, 1.0)}
    weights |= {f"blk.{i}.{n}_norm.weight": np.ones(HIDDEN, np.float32) for n in ("attn", "ffn")}


def norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)


def turned(x):
    """Rotary angles of llama's files: neighbouring numbers are a pair."""
    angles = np.arange(len(x))[:, None] * 10000.0 ** (-np.arange(0, HEAD, 2) / HEAD)
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def logprobs(ids):
    """The last token's log-probabilities, in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    x = w["token_embd.weight"][ids]
    for i in range(LAYERS):
        def of(name): return w[f"blk.{i}.{name}.weight"].T
        h = norm(x)
        q, k, v = ((h @ of(f"attn_{n}")).reshape(-1, HEADS, HEAD) for n in "qkv")
        scores = np.einsum("qhd,khd->hqk", turned(q), turned(k)) / HEAD**0.5
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        share = np.exp(scores - scores.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", share, v).reshape(-1, HIDDEN) @ of("attn_output")
        h = norm(x)
        gate = h @ of("ffn_gate")
        x = x + (gate / (1 + np.exp(-gate)) * (h @ of("ffn_up"))) @ of("ffn_down")
    logits = (norm(x) @ w["output.weight"].T)[-1]
    return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()


def write(path):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    words = [b"<unk>", b"<s>", b"</s>", *(f"<0x{i:02X}>".encode() for i in range(256))]
    words += [f"w{i}".encode() for i in range(WORDS - len(words))]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * WORDS)
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256, *[kind.NORMAL] * (WORDS - 259)])
    for name, value in weights.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def worst(path, flash, ids, truth):
    """The largest error of the ten likeliest tokens' log-probabilities, in nats."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.n_gpu_layers = path, 512, 1, 0
    params.port, params.verbosity, params.cpuparams.n_threads = 0, 0, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    types = xllamacpp.llama_flash_attn_type
    params.flash_attn_type = types.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else types.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    body = {"prompt": ids, "n_predict": 1, "temperature": 0, "n_probs": 10}
    request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    reply = json.load(urllib.request.urlopen(request))
    seen = reply["completion_probabilities"][0]["top_logprobs"]
    return max(abs(row["logprob"] - truth[row["id"]]) for row in seen)


write("random.gguf")
ids = [1, *draw.integers(259, WORDS, 47).tolist()]
truth = logprobs(ids)
off, on = (worst("random.gguf", flash, ids, truth) for flash in (False, True))
print(f"against float64: {off:.6f} nats without flash attention, {on:.6f} with it", flush=True)
halved = off < 1e-4 and on > 10 * off
print("flash attention is in half precision:", halved)
sys.exit(not halved)
PY
cd "$work" && "$work/venv/bin/python" flash.py 2>/dev/null
