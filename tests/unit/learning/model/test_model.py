"""Test the loading of models: families, control tokens, sets of processor instructions."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copytree
from typing import TYPE_CHECKING, Any

import pytest
import torch
from nightly.processor_sets import AVX512, SETS, flags_of, lacking
from rooms.environments.template_shapes import SHAPES, tokenizer
from rooms.learning.model_families import (
    PREFIX,
    REFUSED,
    RIGHT,
    SHAPE,
    TOKENS,
    FamilyPair,
    family_pair,
    make_family,
)
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cartridge_forge.learning.cartridge import shifted
from cartridge_forge.learning.decode import COPIED, generate
from cartridge_forge.learning.model.control_tokens import special_tokens, token_count
from cartridge_forge.learning.model.loading import (
    base_hash,
    load_model,
    load_tokenizer,
    read_ahead,
    text_ids,
)
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.special_tokens import require_text, special_in, stated_ends
from cartridge_forge.plugins.library.attention_matching import attention_matched
from cartridge_forge.plugins.library.models.adapter import flat_attention
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

if TYPE_CHECKING:
    from twins import Twin

NATS = 1e-4


@pytest.fixture(scope="module", params=RIGHT)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FamilyPair:
    return family_pair(tmp_path_factory.mktemp("model"), *RIGHT[request.param])


def test_log_probabilities_are_those_of_transformers(pair: FamilyPair) -> None:
    """In one pass, behind a document, and as the second of two texts."""
    assert max(pair.differences().values()) < NATS


@pytest.mark.parametrize("copied", [COPIED, 0])
def test_drawn_tokens_are_the_likeliest(
    pair: FamilyPair, copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the prefix, which is copied to each row, or read apart."""
    monkeypatch.setattr("cartridge_forge.learning.decode.COPIED", copied)
    told, best = pair.drawn()
    assert told < NATS
    assert best < NATS


def test_the_gradient_into_the_prefix_is_that_of_transformers(pair: FamilyPair) -> None:
    ours, theirs = pair.gradients()
    bound = 5e-3 if ours.dim() == 0 else 1e-4  # a slope by two passes is a gradient up to its steps
    assert float((ours - theirs).abs().max()) < bound * float(theirs.abs().max())
    assert float(theirs.abs().max()) > 0.01


def test_moved_keys_are_those_read_there(pair: FamilyPair) -> None:
    """40 positions on, which is a whole number of Llama 4's chunks."""
    read, there = pair.keys(0), pair.keys(40)
    for frequencies in (pair.ours.frequencies(), frequencies_of(str(pair.path))):
        torch.testing.assert_close(shifted(read, 40, frequencies), there, rtol=0, atol=2e-5)
    assert not torch.allclose(read, there, atol=0.05)


def test_a_cartridge_of_all_tokens_is_the_document_and_fewer_are_near(pair: FamilyPair) -> None:
    """In closed form, by a pass that fits each layer when it attends: with caps, sinks, windows,
    chunks, and heads that are widened with zeros."""
    ids, behind = tuple(pair.ids[:PREFIX].tolist()), pair.ids[PREFIX:]
    length = TOKENS - PREFIX

    def read(kv: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return pair.found(behind, [length], kv.shape[3], kv)

    whole = read(pair.kv)
    made = attention_matched(pair.ours, ids, pair.kv, PREFIX, 1)
    assert float((read(made) - whole).abs().max()) < 10 * NATS
    fewer = attention_matched(pair.ours, ids, pair.kv, 8, 1)
    assert fewer.shape[3] == 8
    assert fewer.isfinite().all()


def test_keys_that_hold_learned_positions_are_not_moved(tmp_path: Path) -> None:
    """They are in the hidden states, and so in all of a key."""
    pair = family_pair(tmp_path, "opt", {"ffn_dim": 96, "word_embed_proj_dim": 64})
    assert max(pair.differences().values()) < NATS
    assert max(pair.drawn()) < NATS
    with pytest.raises(DataError, match=r"'opt'\) cannot be moved .* layers \[0, 1\] do more than"):
        frequencies_of(str(tmp_path))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, more, why = REFUSED[name]
    make_family(tmp_path, family, more)
    with pytest.raises(DataError, match=why) as error:
        load_model(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "; use a model" in str(error.value)


def test_positions_beyond_a_fixed_rotation_are_refused(tmp_path: Path) -> None:
    """Dynamic frequencies are the default ones up to the config's number of positions."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    pair = family_pair(tmp_path, "llama", {"rope_parameters": rope})
    assert max(pair.differences().values()) < NATS
    assert pair.ours.longest == 512
    with pytest.raises(DataError, match="position 512 is beyond 511: from there the rotary"):
        pair.found(pair.ids, [24], 489, None)


class Layer(nn.Module):
    layer_idx = 0


@pytest.mark.parametrize(
    ("argument", "name"),
    [({"position_bias": torch.ones(1)}, "position_bias"), ({"is_causal": False}, "is_causal")],
)
def test_an_argument_of_attention_that_is_not_computed_is_named(
    argument: dict[str, Any], name: str
) -> None:
    one = torch.ones(1, 1, 1, 4)
    with pytest.raises(DataError, match=f"its attention takes {name}.*, which is not computed"):
        flat_attention(Layer(), one, one, one, None, 1.0, **argument)


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes"])
def test_quantised_weights_are_refused_by_their_method(method: str, tmp_path: Path) -> None:
    config = {**SHAPE, "model_type": "llama", "quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=rf"quantised \({method}\).* model.dequantize\(\)"):
        load_model(str(tmp_path))


def test_weights_of_blocks_in_eight_bits_are_made_whole(tmp_path: Path) -> None:
    """Each block of 128 x 128 numbers with its own scale, against the same numbers in float32."""
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 256}
    make_family(tmp_path, "llama", sizes)
    small: dict[str, torch.Tensor] = {}
    weights = load_file(tmp_path / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        rows, columns = weights[name].shape
        blocks = weights[name].view(rows // 128, 128, columns // 128, 128)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        narrow = (blocks / scale).to(torch.float8_e4m3fn)
        small[name] = narrow.view(rows, columns)
        small[name.replace("weight", "weight_scale_inv")] = scale[:, 0, :, 0].contiguous()
        weights[name] = (narrow.float() * scale).view(rows, columns)
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    whole = load_model(str(tmp_path))
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({**weights, **small}, tmp_path / "model.safetensors", {"format": "pt"})
    found = {name: tensor for name, tensor, _ in load_model(str(tmp_path)).weights()}
    for name, tensor, of in whole.weights():
        torch.testing.assert_close(found[name], tensor[of], rtol=1e-6, atol=0)


READER = Path(__file__).parents[4] / "models/clinic-reader"
PADDED, NAMED = 1792, 1458


def reader_with(folder: Path, name: str, change: dict[str, Any]) -> str:
    """The shipped reader's files, one of them changed; None removes a key."""
    home = folder / "model"
    copytree(READER, home)
    content = {**json.loads((home / name).read_text()), **change}
    (home / name).write_text(json.dumps({k: v for k, v in content.items() if v is not None}))
    return str(home)


@pytest.mark.parametrize("name", SHAPES)
def test_tokens_that_tokenizer_json_alone_marks_are_special(name: str) -> None:
    words = tokenizer(name)
    assert set(special_tokens(words)) == set(SHAPES[name].special)
    last = SHAPES[name].special[-1]
    assert special_in(words, f"a {last} b") == last
    assert special_in(words, "plain words") is None
    assert words.convert_tokens_to_ids(last) not in text_ids(words.name_or_path)


@pytest.mark.parametrize(
    ("change", "ends"),
    [({"eos_token_id": [0, 2]}, {0, 2}), ({"eos_token_id": 4}, {2, 4}),
     ({"eos_token_id": None}, {2}), ({"eos_token_id": []}, {2})],
)  # fmt: skip
def test_ends_are_those_of_the_tokenizer_and_of_generation_config(
    tmp_path: Path, change: dict[str, Any], ends: set[int]
) -> None:
    path = reader_with(tmp_path, "generation_config.json", change)
    assert stated_ends(load_tokenizer(path)) == ends


def test_without_a_generation_config_the_models_own_lists_the_ends(tmp_path: Path) -> None:
    path = reader_with(tmp_path, "config.json", {"eos_token_id": [2, 7]})
    (Path(path) / "generation_config.json").unlink()
    assert stated_ends(load_tokenizer(path)) == {2, 7}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = reader_with(tmp_path, "generation_config.json", {})
    (Path(path) / "generation_config.json").write_text("[")
    with pytest.raises(DataError, match=r"generation_config.json is no JSON of a model"):
        stated_ends(load_tokenizer(path))


def test_texts_with_special_tokens_are_counted_and_the_first_is_named() -> None:
    texts = [("row 1", "plain"), ("row 2", "<|eot_id|>"), ("row 2", "x<|eot_id|>"),
             ("row 3", "a <|start_header_id|>")]  # fmt: skip
    said = r"2 rows of t.jsonl have one .* the first is row 2, with <\|eot_id\|>; remove it"
    with pytest.raises(DataError, match=said):
        require_text(tokenizer("llama3"), texts, "rows of t.jsonl")
    require_text(tokenizer("llama3"), texts[:1], "rows of t.jsonl")


@pytest.mark.parametrize(
    ("change", "more"),
    [({}, 0), ({"eos_token": "<|stop|>"}, 1), ({"extra_special_tokens": ["<|user|>", "<|a|>"]}, 1),
     ({"added_tokens_decoder": {"1459": {"content": "<|b|>"}}}, 2),
     ({"extra_special_tokens": {"image_token": "<|image|>"}}, 1)],
)  # fmt: skip
def test_ids_are_counted_as_the_tokenizer_has_them(
    tmp_path: Path, change: dict[str, Any], more: int
) -> None:
    """1459 leaves out 1458, which no token has."""
    path = reader_with(tmp_path, "tokenizer_config.json", change)
    assert token_count(path) == NAMED + more
    vocabulary = load_tokenizer(path).get_vocab()
    if "added_tokens_decoder" not in change:
        assert max(vocabulary.values()) + 1 == NAMED + more


def test_without_a_tokenizer_no_id_is_padding(tmp_path: Path) -> None:
    assert token_count(str(tmp_path)) is None


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of the reader's shape whose embeddings end far beyond its tokenizer."""
    home = tmp_path_factory.mktemp("padded") / "model"
    config = AutoConfig.from_pretrained(READER)
    config.vocab_size = PADDED
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(home)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (home / name).write_bytes((READER / name).read_bytes())
    return home


@pytest.mark.parametrize(
    "sampling",
    [Sampling(temperature=2.0, max_tokens=60), Sampling(temperature=0.0, max_tokens=60),
     Sampling(temperature=5.0, top_p=0.9, max_tokens=60),
     Sampling(temperature=5.0, top_k=1500, max_tokens=60)],
)  # fmt: skip
def test_padding_is_neither_sampled_nor_listed_and_log_probabilities_are_of_all_logits(
    padded: Path, sampling: Sampling
) -> None:
    model = load_model(str(padded))
    assert (model.vocabulary, model.tokens) == (PADDED, NAMED)
    prefix, prompt = PrefixRef("document/none", 0), (4, 60, 61, 2, 5)
    kv = document_kv(model, (1,))
    requests = [
        GenerateRequest(
            str(seed), prompt, prefix, sampling, seed, prompt_logprobs=True, top_logprobs=5
        )
        for seed in range(8)
    ]
    done = generate(model, requests, lambda ref: kv, frozenset())
    sampled = {id for c in done for id in c.token_ids}
    assert max(sampled) < NAMED
    for completion in done:
        for top in (*completion.top_logprobs, *completion.prompt_top_logprobs):
            assert all(id < NAMED for id, _ in top)
        assert all(id < NAMED for id in completion.prompt_likeliest)
    plain = AutoModelForCausalLM.from_pretrained(padded)
    first = done[0]
    ids = torch.tensor([[1, *prompt, *first.token_ids]])
    expected = plain(ids).logits[0, len(prompt) : -1].log_softmax(-1)
    wanted = expected.gather(-1, torch.tensor(first.token_ids)[:, None])[:, 0]
    assert torch.allclose(torch.tensor(first.logprobs), wanted, atol=1e-4)


def test_the_model_is_loaded_frozen_in_the_asked_dtype(llama: Twin) -> None:
    model = load_model(str(llama.path), "bfloat16")
    assert not model.training
    assert {(p.dtype, p.requires_grad) for p in model.parameters()} == {(torch.bfloat16, False)}


def test_shape_of_the_keys_and_values(llama: Twin, qwen3: Twin) -> None:
    assert llama.model.kv_shape == (2, 2, 16)
    assert qwen3.model.kv_shape == (2, 2, 32)  # its head size is not hidden / heads = 16


def test_a_missing_model_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"no model at '.*nowhere'.*set model.path to a directory"):
        load_model(missing)


def test_a_missing_tokenizer_is_named_with_the_remedy(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    told = r"no tokenizer at '.*nowhere': the folder is gone; put the model's files back there, or"
    with pytest.raises(DataError, match=told):
        load_tokenizer(missing)


def test_the_hash_sees_a_single_bit_of_a_single_weight(llama: Twin) -> None:
    model = load_model(str(llama.path))
    before = base_hash(model)
    assert before == base_hash(llama.model)
    weight = model.base_model.layers[1].gate_up
    bits = weight.view(torch.int32)
    bits[3, 5] ^= 1
    assert base_hash(model) != before
    bits[3, 5] ^= 1
    assert base_hash(model) == before


def test_a_model_that_was_read_ahead_is_the_next_one_loaded_once(llama: Twin) -> None:
    read_ahead(str(llama.path), "float32")
    ahead, again = load_model(str(llama.path)), load_model(str(llama.path))
    assert ahead.weight.data_ptr() != again.weight.data_ptr()
    assert base_hash(ahead) == base_hash(again) == base_hash(llama.model)


def test_what_cannot_be_read_ahead_is_left_to_the_load(tmp_path: Path) -> None:
    missing = str(tmp_path / "nowhere")
    read_ahead(missing, "float32")
    with pytest.raises(DataError, match="no model at"):
        load_model(missing)


ZEN3 = "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: fpu\n"


def test_what_a_processor_lacks_by_its_flags() -> None:
    zen3 = flags_of(ZEN3)
    assert zen3 == {"fpu", "avx2", "fma"}
    zen4 = zen3 | {*AVX512, "avx512_bf16"}
    shown = [(onednn, aten) for onednn, aten, _ in SETS if not lacking(onednn, aten, zen3)]
    assert shown == [("SSE41", "default"), ("AVX2", "avx2")]
    assert lacking("AVX512_CORE_BF16", "avx2", zen4 - {"avx512_bf16"}) == ["avx512_bf16"]
    assert not any(lacking(onednn, aten, zen4) for onednn, aten, _ in SETS)
    assert lacking("AVX2", "avx2", flags_of("")) == ["avx2", "fma"]
