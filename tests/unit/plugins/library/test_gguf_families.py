"""Read GGUF files of each family: weights to the bit, config, and SentencePiece's tokenizers.

Files are written as llama.cpp's converter does, with the names of weights that `gguf` itself gives.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.model.loading import load_model, load_tokenizer, tokenizer_of
from cartridge_forge.plugins.library.base_models.kept import add_model
from cartridge_forge.protocols.errors import DataError

SHAPE: dict[str, Any] = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "initializer_range": 0.2,
}  # fmt: skip
THETA = {"rope_type": "default", "rope_theta": 5000.0}
GEMMA_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
TEXTS = (
    "it's 1234 apples", "  two  spaces\n\nand lines\n        1", "naïve café “x”", "日本 😀",
    "def f(x):\n    return x1\n", "", " ", "   a b  ",
)  # fmt: skip
CHAT = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=THETA))


def untied_llama() -> PreTrainedModel:
    shape = {**SHAPE, "tie_word_embeddings": False}
    rope = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}
    return LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=rope))


def mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**SHAPE, rope_parameters=THETA, sliding_window=8))


def qwen2() -> PreTrainedModel:
    return Qwen2ForCausalLM(
        Qwen2Config(**{**SHAPE, "head_dim": 16}, rope_parameters=THETA, use_sliding_window=False)
    )


def qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, rope_parameters=THETA, use_sliding_window=False))


def gemma3() -> PreTrainedModel:
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE,
            rope_parameters=GEMMA_ROPES,
            sliding_window=8,
            query_pre_attn_scalar=32,
            layer_types=[*["sliding_attention"] * 5, "full_attention", *["sliding_attention"] * 2],
        )
    )


ARCHITECTURES: Mapping[str, tuple[str, Callable[[], PreTrainedModel]]] = {
    "llama": ("llama", llama), "untied_llama": ("llama", untied_llama),
    "mistral": ("llama", mistral), "qwen2": ("qwen2", qwen2), "qwen3": ("qwen3", qwen3),
    "gemma3": ("gemma3", gemma3),
}  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    """A BPE model of 400 pieces with bytes, and none of SentencePiece's own rewriting."""
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*filter(str.strip, TEXTS), "the apples of the cafe"] * 8),
        model_writer=written, vocab_size=400, model_type="bpe", byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", hard_vocab_limit=False,
        remove_extra_whitespaces=False, split_digits=True, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def drawn(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """A model whose norms and biases are numbers that bfloat16 has: nothing is lost plus one."""
    torch.manual_seed(0)
    model = make().eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data = (torch.rand_like(parameter) - 0.5).bfloat16().float()
            if "norm" in name and model.config.model_type != "gemma3_text":
                parameter.data += 1
    return model


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp has them: row 2i of a head is i, row 2i + 1 is D/2 + i."""
    size = weight.shape[0] // heads
    order = [
        h * size + half * size // 2 + i
        for h in range(heads) for i in range(size // 2) for half in (0, 1)
    ]  # fmt: skip
    return weight[order]


def write_gguf(
    path: Path, architecture: str, model: PreTrainedModel,
    pieces: sentencepiece.SentencePieceProcessor, **changes: Any,
) -> Path:  # fmt: skip
    """Write a model and a SentencePiece tokenizer; `changes` replace fields, None drops one."""
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(getattr(config, "head_dim", 16))
    writer.add_value_length(getattr(config, "head_dim", 16))
    writer.add_rope_freq_base(5000.0)
    if model.config.model_type in ("mistral", "gemma3_text"):
        writer.add_sliding_window(8)
    count = pieces.get_piece_size()
    tokens = [pieces.id_to_piece(i) for i in range(count)]
    kinds = [
        2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
        for i in range(count)
    ]
    extra: dict[str, int] = changes.pop("extra", {})
    fields = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.chat_template": CHAT, **changes,
    }  # fmt: skip
    for key, value in fields.items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
            str: writer.add_string, type(None): lambda *_: None,
        }[type(value)]  # fmt: skip
        add(key, value)
    writer.add_array("tokenizer.ggml.tokens", [*tokens, *extra])
    writer.add_array(
        "tokenizer.ggml.scores",
        [*(pieces.get_score(i) for i in range(count)), *[-1e3] * len(extra)],
    )
    writer.add_array("tokenizer.ggml.token_type", [*kinds, *extra.values()])
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        heads = {
            "q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads,
        }.get(name.split(".")[-2])  # fmt: skip
        if architecture == "llama" and heads:
            weight = interleaved(weight, heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            weight = weight + 1
        there = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert there is not None, name
        writer.add_tensor(there, weight.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SCALING: Mapping[str, dict[str, Any]] = {
    "untied_llama": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    "gemma3": {"gemma3.rope.scaling.type": "linear", "gemma3.rope.scaling.factor": 8.0},
}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_reads_back_as_the_model_that_was_written(
    family: str, tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    architecture, make = ARCHITECTURES[family]
    model = drawn(make)
    changes = SCALING.get(family, {})
    add_model(str(write_gguf(tmp_path / "tiny.gguf", architecture, model, pieces, **changes)))
    theirs = AutoModelForCausalLM.from_pretrained(home / "tiny").eval()
    written = model.state_dict()
    assert written.keys() == theirs.state_dict().keys()
    assert all(torch.equal(w, written[name]) for name, w in theirs.state_dict().items())

    ids = torch.arange(40)[None] * 7 % 300  # past the windows of 8
    ours = load_model(str(home / "tiny"))
    layers, heads, size = ours.kv_shape
    positions, none = torch.arange(40), torch.zeros(layers, 2, heads, 0, size)
    with torch.no_grad():
        wanted = model(ids).logits
        assert torch.equal(theirs(ids).logits, wanted)
        states = ours(ids[0], positions, FlatAttention([40], (1,), positions, [none]))
        torch.testing.assert_close(ours.lm_head(states)[None], wanted, rtol=1e-4, atol=1e-4)


def test_gemma_s_config_is_that_of_its_publisher(
    tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    model = drawn(gemma3)
    add_model(str(write_gguf(tmp_path / "g.gguf", "gemma3", model, pieces, **SCALING["gemma3"])))
    made = json.loads((home / "g" / "config.json").read_text())
    assert made["architectures"] == ["Gemma3ForCausalLM"]
    assert made["layer_types"] == model.config.layer_types
    assert made["rope_parameters"] == GEMMA_ROPES
    assert (made["query_pre_attn_scalar"], made["sliding_window"]) == (32, 8)
    assert (made["hidden_activation"], made["vocab_size"]) == ("gelu_pytorch_tanh", 400)


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("qwen3", {"qwen3.rope.scaling.type": "yarn"}, "scales its rotation by 'yarn'"),
        ("qwen2", {"qwen2.attention.sliding_window": 4}, r"qwen2\.attention\.sliding_window = 4"),
        ("llama", {"llama.rope.dimension_count": 16}, r"llama\.rope\.dimension_count = 16"),
        ("llama", {"llama.logit_scale": 0.5}, r"llama\.logit_scale = 0\.5, which is not computed"),
        ("llama", {"llama.expert_count": 8}, r"llama\.expert_count = 8"),
        ("llama", {"tokenizer.ggml.model": "t5"}, r"tokenizer of kind 't5', ''.*SentencePiece"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(
    family: str, changes: dict[str, Any], said: str, tmp_path: Path, home: Path,
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:  # fmt: skip
    architecture, make = ARCHITECTURES[family]
    path = write_gguf(tmp_path / "odd.gguf", architecture, drawn(make), pieces, **changes)
    with pytest.raises(DataError, match=said):
        add_model(str(path))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("factor", [{}, {"llama.rope.scaling.factor": 1.0}, {
    "llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}])  # fmt: skip
def test_a_rotation_that_is_not_scaled_is_the_default(
    factor: dict[str, Any], tmp_path: Path, home: Path,
    pieces: sentencepiece.SentencePieceProcessor,
) -> None:  # fmt: skip
    add_model(str(write_gguf(tmp_path / "x.gguf", "llama", drawn(llama), pieces, **factor)))
    assert json.loads((home / "x" / "config.json").read_text())["rope_parameters"] == THETA


@pytest.mark.parametrize("spaced", [True, False])
def test_sentencepiece_s_pairs_are_joined_as_it_joins_them(
    spaced: bool, tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    model = drawn(llama)
    changes = {"tokenizer.ggml.add_space_prefix": spaced}
    add_model(str(write_gguf(tmp_path / "p.gguf", "llama", model, pieces, **changes)))
    ours = tokenizer_of(str(home / "p"))
    draws = random.Random(0)
    letters = [pieces.id_to_piece(i) for i in range(259, pieces.get_piece_size())] + [
        "▁",
        "é",
        "語",
    ]
    drawn_texts = (
        "".join(draws.choices(letters, k=12)).replace("▁", " ").strip() for _ in range(300)
    )
    for text in (*TEXTS, *drawn_texts):
        # Its prefix space is a setting of the model: without it, it is written by hand.
        wanted = pieces.encode(text) if spaced and text else _without_prefix(pieces, text)
        assert ours(text, add_special_tokens=False).input_ids == wanted, text
        assert ours.decode(wanted) == text
    assert ours("apples").input_ids[0] == 1  # a text begins with <s>


def _without_prefix(pieces: sentencepiece.SentencePieceProcessor, text: str) -> list[int]:
    """Encode a text after a letter that no pair has, and take the letter's bytes away."""
    before = pieces.encode("ß")
    whole: list[int] = pieces.encode("ß" + text)
    assert whole[: len(before)] == before
    return whole[len(before) :]


def test_llama_2_s_chat_has_a_space_after_a_special_token_and_mistral_s_third_has_none(
    tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    """Llama 2's chats begin with 1, 518: `<s>`, `▁[`. Of Mistral 7B v0.3 `[INST]` is one token, and
    its template writes the space that follows."""
    asked: Any = [{"role": "user", "content": "apples"}]
    add_model(str(write_gguf(tmp_path / "two.gguf", "llama", drawn(llama), pieces)))
    two = load_tokenizer(str(home / "two"))
    ids = two.apply_chat_template(asked, return_dict=False)
    assert ids == [1, *pieces.encode("[INST] apples [/INST]")]
    extra = {"[INST]": 3, "[/INST]": 3}
    shape = {**SHAPE, "vocab_size": 402}
    wide = drawn(lambda: LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=THETA)))
    add_model(str(write_gguf(tmp_path / "third.gguf", "llama", wide, pieces, extra=extra)))
    third = load_tokenizer(str(home / "third"))
    n = pieces.get_piece_size()
    apples = pieces.encode("apples ")
    assert third.apply_chat_template(asked, return_dict=False) == [1, n, *apples, n + 1]


def test_user_defined_tokens_are_joined_to_nothing(
    tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    """Gemma's runs of spaces and lines: longest first, whatever stands beside them."""
    shape = {**SHAPE, "vocab_size": 404}
    wide = drawn(lambda: LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=THETA)))
    extra = {"  ": 4, "   ": 4, "\n": 4, "\n\n": 4}
    changes = {"tokenizer.ggml.add_space_prefix": False, "extra": extra}
    add_model(str(write_gguf(tmp_path / "u.gguf", "llama", wide, pieces, **changes)))
    ours, n = tokenizer_of(str(home / "u")), pieces.get_piece_size()
    two, three, line, lines = range(n, n + 4)
    apples = _without_prefix(pieces, "apples")
    found = ours("     apples\n\n\napples", add_special_tokens=False).input_ids
    assert found == [three, two, *apples, lines, line, *apples]
    assert ours.decode(found) == "     apples\n\n\napples"
    assert not ours.all_special_ids[3:]  # none of them is special


def test_embeddings_beyond_the_tokenizer_have_no_tokens(
    tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    """llama.cpp names each of them, with the kind "unused"; the publisher's tokenizer does not."""
    shape = {**SHAPE, "vocab_size": 403}
    wide = drawn(lambda: LlamaForCausalLM(LlamaConfig(**shape, rope_parameters=THETA)))
    extra = {"[PAD400]": 5, "[PAD401]": 5, "[PAD402]": 5}
    add_model(str(write_gguf(tmp_path / "pad.gguf", "llama", wide, pieces, extra=extra)))
    assert len(tokenizer_of(str(home / "pad"))) == pieces.get_piece_size()
    assert json.loads((home / "pad" / "config.json").read_text())["vocab_size"] == 403


def test_a_base_model_is_kept_and_does_not_chat(
    tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    changes = {"tokenizer.chat_template": None}
    add_model(str(write_gguf(tmp_path / "base.gguf", "llama", drawn(llama), pieces, **changes)))
    assert tokenizer_of(str(home / "base"))("apples").input_ids[0] == 1
    with pytest.raises(DataError, match=r"the model base has no chat template.* a base model"):
        load_tokenizer(str(home / "base"))


def test_weights_of_half_precision_are_read(tmp_path: Path) -> None:
    """bfloat16's bits are the upper half of float32's; 1.0, -2.5 and 2^-126 by hand."""
    from cartridge_forge.plugins.library.base_models.gguf_file import GgufFile

    values = np.array([0x3F80, 0xC020, 0x0080, 0x0000] * 8, np.uint16).view(np.uint8)[None]
    writer = gguf.GGUFWriter(tmp_path / "h.gguf", "llama")
    writer.add_tensor("x", values, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "h.gguf").tensors
    found = GgufFile._numbers(GgufFile.__new__(GgufFile), tensor)
    assert found.flatten().tolist() == [1.0, -2.5, 2.0**-126, 0.0] * 8
