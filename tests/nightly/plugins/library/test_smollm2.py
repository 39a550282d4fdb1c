"""Download SmolLM2-135M-Instruct from the package index and read it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cartridge_forge.learning.model.loading import load_tokenizer
from cartridge_forge.plugins.library.base_models.kept import add_model


@pytest.mark.timeout(1200)
def test_the_packaged_model_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path))
    found = add_model("smollm2-135m")
    assert found.sha256.startswith("a672150fb4f9")
    assert (found.licence, found.bytes) == ("apache-2.0", 538_090_408)
    path = str(tmp_path / "models" / "smollm2-135m")
    tokenizer, model = load_tokenizer(path), AutoModelForCausalLM.from_pretrained(path)
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True, return_tensors="pt", return_dict=False,
    )  # fmt: skip
    with torch.no_grad():
        said = model.generate(asked, max_new_tokens=16, do_sample=False)[0, asked.shape[1] :]
    assert "Paris" in tokenizer.decode(said)
