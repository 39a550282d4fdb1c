"""Read GGUF files of each family: weights to the bit, config, and SentencePiece's tokenizers.

Files are written as llama.cpp's converter does, with the names of weights that `gguf` itself gives.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
from gguf_setup import (
    ARCHITECTURES,
    GEMMA_ROPES,
    SCALING,
    SHAPE,
    TEXTS,
    THETA,
    drawn,
    gemma3,
    llama,
    trained_pieces,
    write_gguf,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.model.loading import load_model, load_tokenizer, tokenizer_of
from cartridge_forge.plugins.library.base_models.kept import add_model
from cartridge_forge.protocols.errors import DataError


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


@pytest.fixture(scope="module")
def pieces() -> sentencepiece.SentencePieceProcessor:
    return trained_pieces()


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_a_file_reads_back_as_the_model_that_was_written(
    family: str, tmp_path: Path, home: Path, pieces: sentencepiece.SentencePieceProcessor
) -> None:
    architecture, make = ARCHITECTURES[family]
    model = drawn(make)
    changes = SCALING.get(family, {})
    add_model(str(write_gguf(tmp_path / "tiny.gguf", architecture, model, pieces, **changes)))
    ours = load_model(str(home / "tiny"))
    theirs = AutoModelForCausalLM.from_pretrained(home / "tiny").eval()
    written = model.state_dict()
    assert written.keys() == theirs.state_dict().keys()
    assert all(torch.equal(w, written[name]) for name, w in theirs.state_dict().items())

    ids = torch.arange(40)[None] * 7 % 300  # past the windows of 8
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
