"""Our decoder against transformers, family by family; its products are those of `F.linear`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rooms.learning.trainer_setup import random_rounding
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel
from twins import NEAR, SHAPE, VOCAB

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decode import COPIED, generate
from cartridge_forge.learning.decoder import (
    BACKWARD,
    PADDED_TO,
    SMALLEST,
    Decoder,
    linear,
    packed,
    rope_frequencies,
)
from cartridge_forge.learning.decoder_config import decoder_config
from cartridge_forge.learning.model.loading import base_hash, known_config, load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"head_dim": 16}),
    "llama tied": ("llama", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "linear rope": ("llama", {"head_dim": 16, "rope_parameters": LINEAR}),
    "wide heads": ("llama", {"head_dim": 24}),
    "llama bias": ("llama", {"head_dim": 16, "attention_bias": True}),
    "qwen2": ("qwen2", {}),
    "qwen2 window": (
        "qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"head_dim": 16, "sliding_window": None}),
    "mistral window": ("mistral", {"head_dim": 16, "sliding_window": 7}),
    "one key head": ("llama", {"head_dim": 16, "num_key_value_heads": 1}),
}  # fmt: skip
PREFIXES = (9, 4)
IDS = [[5, 9, 31, 17, 60, 8, 44], [7, 7, 90], [12, 3, 55, 20]]  # the last two over one prefix


@dataclass(frozen=True)
class Pair:
    """The same weights in our decoder and in transformers."""

    path: Path
    ours: Decoder
    plain: PreTrainedModel

    def logits(self, ids: list[int], kv: Tensor | None) -> Tensor:
        """Transformers' logits [T, V] of one sequence after a prefix."""
        cache = None
        if kv is not None:  # a windowed layer's cache would drop what it thinks is out of sight
            cache = DynamicCache()
            for layer, (keys, values) in enumerate(kv):
                cache.update(keys[None], values[None], layer)
        return self.plain(torch.tensor([ids]), past_key_values=cache).logits[0]


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    family, changes = CASES[request.param]
    path = tmp_path_factory.mktemp("model")
    config = AutoConfig.for_model(family, **{**SHAPE, **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:  # ones and zeros as initialised: would not show
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(path)
    plain = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    )
    ours = load_model(str(path))
    assert isinstance(ours, Decoder)
    return Pair(path, ours, plain.requires_grad_(False).eval())


def prefixes_of(model: Decoder) -> list[Tensor]:
    """Prefixes of unequal lengths that no tokens could make."""
    draws = torch.Generator().manual_seed(3)
    layers, heads, size = model.kv_shape
    return [torch.randn(layers, 2, heads, n, size, generator=draws) for n in PREFIXES]


def our_logits(
    model: Decoder,
    prefixes: list[Tensor],
    read: Tensor | None = None,
    counts: tuple[int, ...] = (1, 2),
) -> Tensor:
    """Our logits [M, V] of IDS, all in one flat pass."""
    starts = [p.shape[3] for p, n in zip(prefixes, counts, strict=True) for _ in range(n)]
    positions = torch.tensor(
        [s + t for s, ids in zip(starts, IDS, strict=True) for t in range(len(ids))]
    )
    attention = FlatAttention([len(ids) for ids in IDS], counts, positions, prefixes, read)
    flat = torch.tensor([i for ids in IDS for i in ids])
    return model.lm_head(model(flat, positions, attention, read))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=NEAR)


def test_logits_over_prefixes_of_unequal_lengths(pair: Pair) -> None:
    prefixes = prefixes_of(pair.ours)
    expected = [pair.logits(ids, prefixes[min(i, 1)]) for i, ids in enumerate(IDS)]
    close(our_logits(pair.ours, prefixes), torch.cat(expected))


def test_logits_without_a_prefix(pair: Pair) -> None:
    layers, heads, size = pair.ours.kv_shape
    none = torch.zeros(layers, 2, heads, 0, size)
    found = our_logits(pair.ours, [none], counts=(3,))
    close(found, torch.cat([pair.logits(ids, None) for ids in IDS]))


def test_only_the_tokens_that_are_read(pair: Pair) -> None:
    """Two of the first sequence, none of the second, the last token of the third."""
    prefixes, read = prefixes_of(pair.ours), torch.tensor([2, 5, 13])
    close(our_logits(pair.ours, prefixes, read), our_logits(pair.ours, prefixes)[read])


def test_gradients_into_the_prefixes(pair: Pair) -> None:
    """Each weighted logit's, of a pass that reads some tokens; the second prefix is not trained."""
    prefixes, read = prefixes_of(pair.ours), torch.tensor([2, 5, 6, 8, 13])
    learned = [prefixes[0].clone().requires_grad_(), prefixes[1]]
    weight = torch.sin(torch.arange(5 * VOCAB)).view(5, VOCAB)
    (our_logits(pair.ours, learned, read) * weight).sum().backward()
    there = prefixes[0].clone().requires_grad_()
    (pair.logits(IDS[0], there)[[2, 5, 6]] * weight[:3]).sum().backward()
    assert learned[0].grad is not None
    assert there.grad is not None
    torch.testing.assert_close(learned[0].grad, there.grad, rtol=1e-4, atol=1e-4)
    assert there.grad.abs().amax() > 0.1


# Prefixes of 9 and 4 tokens are copied to their rows both, the short one alone, or neither.
@pytest.mark.parametrize(
    ("kept_twice", "copied"), [(False, COPIED), (True, COPIED), (False, 4), (False, 0)]
)
def test_greedy_tokens(
    pair: Pair, kept_twice: bool, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cartridge_forge.learning.decode.COPIED", copied)
    prefixes = prefixes_of(pair.ours)
    model = load_model(str(pair.path))
    if kept_twice:
        monkeypatch.setitem(SMALLEST, torch.float32, 0)  # oneDNN for these weights too
        model.pack()
        assert model.packed_head is not None
    asked = [
        GenerateRequest(
            str(i),
            tuple(ids),
            PrefixRef("b" if i else "a", 0),
            Sampling(temperature=0.0, max_tokens=12),
            i,
        )
        for i, ids in enumerate(IDS)
    ]
    done = generate(model, asked, lambda ref: prefixes["ab".index(ref.name)], frozenset())
    for i, completion in enumerate(done):
        text = [*IDS[i]]
        for _ in range(12):
            text.append(int(pair.logits(text, prefixes[min(i, 1)])[-1].argmax()))
        assert list(completion.token_ids) == text[len(IDS[i]) :]


def test_packed_weights_are_read_where_no_gradient_is_wanted(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SMALLEST, torch.float32, 0)  # oneDNN for these weights too
    model = load_model(str(pair.path))
    assert isinstance(model, Decoder)
    model.pack()
    layer = model.base_model.layers[0]
    with torch.no_grad():
        close(our_logits(model, prefixes_of(model)), our_logits(pair.ours, prefixes_of(model)))
        layer.packed["down"] = packed(torch.zeros_like(layer.down))
        moved = our_logits(model, prefixes_of(model))
    assert not torch.allclose(moved, our_logits(pair.ours, prefixes_of(model)), atol=1e-3)
    assert base_hash(model) == base_hash(pair.ours)


def test_a_large_model_is_held_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(str(pair.path))
    monkeypatch.setattr("cartridge_forge.learning.decoder.PACKED_BYTES", 1000)
    model.pack()
    assert model.packed_head is None
    assert not any(layer.packed for layer in model.base_model.layers)


def test_a_document_in_chunks(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [i for part in IDS for i in part]
    monkeypatch.setattr("cartridge_forge.learning.teacher.PREFILL_CHUNK", 5)
    kv = document_kv(pair.ours, ids)
    cache = DynamicCache()
    pair.plain(torch.tensor([ids]), past_key_values=cache, use_cache=True)
    expected = torch.stack([torch.cat([x.keys, x.values]) for x in cache.layers])
    torch.testing.assert_close(kv, expected, rtol=0, atol=NEAR)


def test_the_hash_is_that_of_the_files_weights_by_their_names(pair: Pair) -> None:
    import hashlib

    digest = hashlib.sha256()
    for name, tensor in sorted(pair.plain.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    assert base_hash(pair.ours) == digest.hexdigest()


def test_frequencies_are_those_of_transformers(pair: Pair) -> None:
    expected = pair.plain.base_model.rotary_emb.inv_freq.double()
    found = pair.ours.frequencies().values
    torch.testing.assert_close(found, torch.cat([-expected, expected])[None], rtol=1e-6, atol=0)
    assert torch.equal(frequencies_of(str(pair.path)).values, found)


def test_a_bfloat16_model_is_the_float32_one_but_for_rounding(pair: Pair) -> None:
    """Its weights are the file's, rounded, and its logits no farther from float64 than those of
    passes that round at random."""
    half = load_model(str(pair.path), "bfloat16")
    assert half.dtype == torch.bfloat16
    whole = dict(pair.ours.named_parameters())
    assert all(torch.equal(p, whole[name].to(p.dtype)) for name, p in half.named_parameters())
    prefixes = [kv.bfloat16() for kv in prefixes_of(pair.ours)]
    drawn = []
    for seed in range(4):
        with random_rounding(seed):
            drawn.append(our_logits(half, prefixes).double())
    found = our_logits(half, prefixes).double()
    exact = our_logits(half.to(torch.float64), [kv.double() for kv in prefixes])
    assert (found - exact).norm() <= max((logits - exact).norm() for logits in drawn)


def test_linear_and_llama3_frequencies_by_hand() -> None:
    """One pair of wavelength 2 pi: of 64 positions it turns 10.2 times, more than high: as it was;
    of 4 positions 0.64 times, less than low: 8 times slower."""
    rope = {**LLAMA3, "rope_theta": 1.0}
    assert rope_frequencies(rope, 2).tolist() == [1.0]
    rope["original_max_position_embeddings"] = 4
    assert rope_frequencies(rope, 2).tolist() == [0.125]
    # 16 positions: 2.546 turns, kept (2.546 - 1) / 3 = 0.5155; (1 - 0.5155) / 8 + 0.5155 = 0.576
    rope["original_max_position_embeddings"] = 16
    assert rope_frequencies(rope, 2).tolist() == pytest.approx([0.57606], abs=1e-4)
    assert rope_frequencies({**LINEAR, "rope_theta": 1.0}, 2).tolist() == [0.5]


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "gemma2"}, {"hidden_act": "gelu"}, {"mlp_bias": True},
        {"rope_parameters": {"rope_type": "yarn"}}, {"quantization_config": {}},
        {"partial_rotary_factor": 0.5},
    ],
)  # fmt: skip
def test_an_unknown_architecture_is_left_to_transformers(changes: dict[str, Any]) -> None:
    config = {"model_type": "llama", **SHAPE}
    assert decoder_config(config) is not None
    assert decoder_config({**config, **changes}) is None


def test_the_older_form_of_a_config_is_read() -> None:
    config = {"model_type": "llama", **SHAPE, "rope_theta": 5e5}
    rope = {k: v for k, v in LLAMA3.items() if k != "rope_theta"}
    rope["type"] = rope.pop("rope_type")
    found = decoder_config({**config, "rope_scaling": rope})
    assert found is not None
    assert (found.rope["rope_type"], found.rope["rope_theta"]) == ("llama3", 5e5)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    config = {"model_type": "llama", **SHAPE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    assert known_config(str(tmp_path)) is not None
    with pytest.raises(DataError, match=r"has no weight .* set model.path to a whole model"):
        load_model(str(tmp_path))


def rounding(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """How far a product [n, out] may be from the exact one, in any order of its sum: that is in
    float32 or wider, one addition for each column and one for the bias, and the product is rounded
    to its type before the bias is added and again after."""
    exact, sizes = (f(x.double()) @ f(weight.double()).T for f in (lambda w: w, torch.abs))
    after = exact if bias is None else exact + bias.double()
    offset = torch.zeros(()) if bias is None else bias.double().abs()
    summed = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps / 2
    once = torch.finfo(x.dtype).eps / 2
    errors = (x.shape[1] + 1) * summed * (sizes + offset)
    return errors + once * (exact.abs() + after.abs() + errors)


@pytest.mark.parametrize("rows", [0, 1, 12, PADDED_TO, PADDED_TO + 1, 300])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "into"), [(40, 64), (1024, 512)])  # under SMALLEST, and at it
def test_a_product(
    rows: int, biased: bool, kept: bool, dtype: torch.dtype, out: int, into: int
) -> None:
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randn(n, into, generator=draw).to(dtype) for n in (rows, out))
    bias = torch.randn(out, generator=draw).to(dtype) if biased else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    with torch.no_grad():
        found = linear(x, weight, bias, packed(weight) if kept else None)
    assert (found.dtype, found.shape) == (dtype, (rows, out))
    assert found.is_contiguous()
    within = rounding(x, weight, bias)
    assert ((found.double() - exact).abs() <= within).all()


@pytest.mark.parametrize("rows", [3, PADDED_TO + 1])
@pytest.mark.parametrize("backward", ["mkl", "onednn"])
@pytest.mark.parametrize(
    ("dtype", "out", "into"),
    [(torch.bfloat16, 5, 16), (torch.float32, 5, 16), (torch.float32, 32768, 16)],
)
def test_a_product_and_its_gradient(
    rows: int, backward: str, dtype: torch.dtype, out: int, into: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Of whole numbers, which the types hold and sum exactly; a strided gradient as well. Packed
    weights have no gradient and are not read for one."""
    monkeypatch.setitem(BACKWARD, "float32", backward)
    draw = torch.Generator().manual_seed(rows)
    x, weight = (torch.randint(-2, 3, (n, into), generator=draw).to(dtype) for n in (rows, out))
    bias = torch.arange(out).to(dtype)
    x.requires_grad_()
    found = linear(x, weight, bias, packed(weight))
    assert torch.equal(found.long(), x.long() @ weight.long().T + torch.arange(out))
    (found.T.contiguous() * torch.arange(rows).to(dtype)).sum().backward()
    expected = torch.arange(rows)[:, None] * weight.long().sum(0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.long(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    ("instructions", "products"), [("avx2", "mkl"), ("avx512", "onednn"), ("default", "onednn")]
)
def test_what_multiplies_gradients(instructions: str, products: str) -> None:
    """As many products by oneDNN: forward and backward, or forward alone. torch caps what it finds
    by a variable, and on a processor without AVX-512 does not go beyond it."""
    code = """
import torch
from cartridge_forge.learning.decoder import BACKWARD, linear

capability = torch.backends.cpu.get_cpu_capability()
linear(torch.ones(64, 1024, requires_grad=True), torch.ones(512, 1024)).sum().backward()
print(capability.lower(), BACKWARD["float32"])
"""
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "ONEDNN_VERBOSE": "1", "ATEN_CPU_CAPABILITY": instructions},
    ).stdout.splitlines()  # fmt: skip
    capability, chosen = said[-1].split()
    if capability != instructions:
        pytest.skip(f"this processor has {capability}")
    assert chosen == products
    ran = [line for line in said if ",exec,cpu," in line and "reorder" not in line]
    assert len(ran) == 1 + (products == "onednn")


def test_a_part_of_a_weight() -> None:
    """The last layer multiplies by rows of a stacked weight, of rows that it picks."""
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 64, generator=draw) for n in (50, 48))
    found = linear(x[::2], weight[16:])
    off = (found.double() - x[::2].double() @ weight[16:].double().T).abs()
    assert (off <= rounding(x[::2], weight[16:])).all()


@pytest.mark.parametrize(
    ("dtype", "out", "into", "rows"),
    [
        ("bfloat16", 3072, 576, (96, 128, 160, 192)),
        ("float32", 3072, 576, (96, 128, 160, 192)),
        ("float32", 320, 192, ()),
    ],
)
def test_few_products_are_compiled(dtype: str, out: int, into: int, rows: tuple[int, ...]) -> None:
    """100 numbers of rows from 92 on are four of padded rows, and a small weight in float32 has
    none compiled: oneDNN says what it compiles. Where it has no bfloat16 it compiles none of
    that."""
    code = f"""
import torch
from cartridge_forge.learning.decoder import SMALLEST, linear

weight = torch.ones({out}, {into}, dtype=torch.{dtype})
x = torch.ones(192, {into}, dtype=torch.{dtype})
for rows in range(92, 192):
    linear(x[:rows], weight)
print("multiplied" if weight.dtype in SMALLEST else "not multiplied")
"""
    said = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True,
        env={**os.environ, "ONEDNN_VERBOSE": "profile_create"},
    ).stdout.splitlines()  # fmt: skip
    shape = re.compile(rf"create:cache_miss,.*\b(?:mb)?(\d+)(?:ic|x){into}(?:oc|:)")
    compiled = {int(found[1]) for line in said if (found := shape.search(line))}
    assert compiled == (set(rows) if said[-1] == "multiplied" else set())


def test_a_processor_for_which_onednn_has_no_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none without AVX-512: torch multiplies, and nothing is packed."""
    monkeypatch.setattr("cartridge_forge.learning.decoder.SMALLEST", {torch.float32: 1 << 19})
    draw = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=draw).bfloat16() for n in (3, 5))
    x.requires_grad_()
    assert packed(weight) is None
    found = linear(x, weight)
    off = (found.double() - x.double() @ weight.double().T).abs()
    assert (off <= rounding(x.detach(), weight)).all()
    found.sum().backward()
    assert x.grad is not None
    ones = torch.ones(1, len(weight), dtype=weight.dtype)
    off = (x.grad[0].double() - weight.double().sum(0)).abs()
    assert (off <= rounding(ones, weight.T)[0]).all()
