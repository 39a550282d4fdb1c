"""A model is checked against its own forward pass, whatever its family is called."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_pages.tiny_models import MODELS, SIZES, make_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from cartridge_forge.learning.model import loading
from cartridge_forge.learning.model.loading import checked_model, load_model
from cartridge_forge.learning.model.verdict import BOUND
from cartridge_forge.plugins.library.models import verdicts
from cartridge_forge.plugins.library.models.adapter import TransformersModel
from cartridge_forge.plugins.library.models.frequencies import frequencies_of
from cartridge_forge.plugins.library.models.parity import check_model
from cartridge_forge.plugins.library.models.short_config import short_configs
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import checks_folder


class LongerIsLouderConfig(LlamaConfig):
    model_type = "longer_is_louder"


class LongerIsLouder(LlamaForCausalLM):
    """Logits that grow with the text: of a part behind a prefix they are others."""

    config_class = LongerIsLouderConfig

    def forward(self, *args: Any, **more: Any) -> Any:
        out = super().forward(*args, **more)
        out.logits = out.logits * (1 + 0.01 * out.logits.shape[1])
        return out


class OddScaleConfig(LlamaConfig):
    model_type = "odd_scale"


class OddScale(LlamaForCausalLM):
    config_class = OddScaleConfig

    def forward(self, *args: Any, **more: Any) -> Any:
        out = super().forward(*args, **more)
        out.logits = out.logits * 1.37
        return out


class OddStateConfig(LlamaConfig):
    model_type = "odd_state"


class OddState(LlamaForCausalLM):
    """Embeddings that carry the sum of those before them: a state beside the attention."""

    config_class = OddStateConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.embed_tokens.register_forward_hook(
            lambda _module, _ids, x: x + 1e-3 * x.cumsum(dim=1)
        )


for config_class, model_class in (
    (LongerIsLouderConfig, LongerIsLouder), (OddScaleConfig, OddScale), (OddStateConfig, OddState),
):  # fmt: skip
    AutoConfig.register(config_class.model_type, config_class)
    AutoModelForCausalLM.register(config_class, model_class)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def made(model_class: type[LlamaForCausalLM], folder: Path) -> str:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        family: Any = model_class.config_class
        model_class(family(**SIZES, initializer_range=0.2)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("model_class", [LongerIsLouder, OddState])
def test_a_family_that_nobody_has_named_is_refused_where_it_is_computed_otherwise(
    model_class: type[LlamaForCausalLM], tmp_path: Path
) -> None:
    path = made(model_class, tmp_path / "odd")
    with pytest.raises(DataError, match=r"odd.*models\.md"):
        load_model(path)


def test_the_refusal_says_which_way_is_off_and_by_how_much(tmp_path: Path) -> None:
    verdict = check_model(made(LongerIsLouder, tmp_path / "odd"))
    assert verdict.nats["plain"] <= BOUND < 0.1 < verdict.nats["prefix"]
    assert f"{verdict.nats['prefix']:.2g} nats behind a prefix" in verdict.refusal
    assert "in one pass" not in verdict.refusal


def test_an_odd_scale_of_an_unknown_family_is_computed_or_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(OddScale, tmp_path / "odd")
    assert not check_model(path).refusal

    def without_it(self: TransformersModel, hidden: Tensor, project: Any) -> Tensor:
        logits: Tensor = project(hidden)
        return logits

    monkeypatch.setattr(TransformersModel, "head", without_it)
    verdict = check_model(path)
    assert min(verdict.nats.values()) > 1
    assert "its last hidden states agree, so what follows them is not computed" in verdict.refusal


@pytest.mark.parametrize("name", ["granite", "gemma2", "gpt_oss", "qwen2, sliding"])
def test_families_with_scales_caps_sinks_and_windows_are_right(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "model")
    verdict = check_model(str(tmp_path / "model"))
    assert set(verdict.nats) == {"plain", "prefix", "packed"}
    assert max(verdict.nats.values()) <= BOUND
    assert not verdict.refusal
    assert not verdict.unmoved


@pytest.mark.parametrize("name", ["qwen3_next", "diffllama", "mamba"])
def test_families_with_state_beside_attention_are_refused(name: str, tmp_path: Path) -> None:
    make_model(name, tmp_path / "model")
    with pytest.raises(DataError, match=rf"family '{name}' is not supported: layers .*models\.md"):
        load_model(str(tmp_path / "model"))


def test_keys_that_cannot_be_moved_are_told_where_cartridges_are_composed(tmp_path: Path) -> None:
    make_model("gpt2", tmp_path / "model")
    model = load_model(str(tmp_path / "model"))
    with pytest.raises(DataError, match=r"cannot be composed: .*use one cartridge"):
        model.frequencies()
    with pytest.raises(DataError, match=r"cannot be composed: .*use one cartridge"):
        frequencies_of(str(tmp_path / "model"))


def test_quantised_weights_are_refused_by_name(tmp_path: Path) -> None:
    make_model("llama", tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    given = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": given}))
    with pytest.raises(DataError, match=r"quantised .*gptq"):
        load_model(str(tmp_path / "model"))


def test_a_text_crosses_the_borders_that_a_config_has() -> None:
    family, more = MODELS["gemma3_text"]
    sizes = {**SIZES, **more, "sliding_window": 4096, "max_position_embeddings": 131_072}
    short = next(short_configs(AutoConfig.for_model(family, **sizes)))
    assert (short.config.sliding_window, short.config.max_position_embeddings) == (8, 16)
    assert short.config.vocab_size == 97


def test_a_number_that_a_weight_has_for_its_size_is_no_border() -> None:
    config = AutoConfig.for_model("gpt2", n_embd=64, n_head=4, n_layer=2, vocab_size=97)
    assert [short.edits for short in short_configs(config)] == [{}]


def test_a_number_that_scales_is_no_border() -> None:
    """Gemma 3 270M scales scores by 1 / sqrt(256). At 1 / sqrt(8) its attention is so sharp that
    float32 alone is 0.03 nats off float64, and a model that is right was refused."""
    sizes = {"num_hidden_layers": 1, "query_pre_attn_scalar": 256, "sliding_window": 512}
    config = AutoConfig.for_model("gemma3_text", **sizes)
    edits = next(short_configs(config)).edits
    assert ("sliding_window", 512) in edits
    assert ("query_pre_attn_scalar", 256) not in edits


def test_a_large_model_is_shortened_to_each_kind_of_its_layers() -> None:
    family, more = MODELS["gemma3_text"]
    kinds = (["sliding_attention"] * 3 + ["full_attention"]) * 4
    sizes = {**SIZES, **more, "num_hidden_layers": 16, "layer_types": kinds, "vocab_size": 10**7}
    short = next(short_configs(AutoConfig.for_model(family, **sizes)))
    assert (short.layers, short.of_layers) == (4, 16)
    assert short.config.layer_types == kinds[:4]


def test_a_verdict_is_made_once_and_anew_for_other_weights(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_model("llama", tmp_path / "model")
    path, weights = str(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    before = weights.stat()
    first = checked_model(path)
    assert len([*checks_folder().glob("*.json")]) == 1
    monkeypatch.setattr(loading, "checked_again", None)  # not called again
    assert checked_model(path) == first
    moved = shutil.copytree(tmp_path / "model", tmp_path / "moved")
    assert checked_model(str(moved)).nats == first.nats
    monkeypatch.undo()
    monkeypatch.setenv("FORGE_HOME", str(home))
    held = bytearray(weights.read_bytes())
    held[-1] ^= 1  # the last bit but seven of one weight
    weights.write_bytes(held)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert verdicts.kept_verdict(path) is None


def test_a_refusal_is_kept_and_names_the_model_that_was_asked_for(tmp_path: Path) -> None:
    make_model("mamba", tmp_path / "model")
    refused = verdicts.ModelVerdict("", "")
    for path in ("model", "copy"):
        if path == "copy":
            shutil.copytree(tmp_path / "model", tmp_path / "copy")
        with pytest.raises(DataError) as caught:
            load_model(str(tmp_path / path))
        refused = verdicts.kept_verdict(str(tmp_path / path)) or refused
        assert repr(str(tmp_path / path)) in str(caught.value)
    assert refused.refusal


def test_a_folder_that_cannot_be_written_keeps_nothing_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "file"))
    make_model("llama", tmp_path / "model")
    assert load_model(str(tmp_path / "model")).vocabulary == 97
    assert verdicts.kept_verdict(str(tmp_path / "model")) is None
