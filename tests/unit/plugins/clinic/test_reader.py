"""The shipped tiny model: a plain Llama directory that reads charts it has never seen."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from cartridge_forge.plugins.clinic import vocabulary as words

READER = Path(__file__).resolve().parents[4] / "models" / "clinic-reader"


def test_transformers_loads_it_unmodified_and_it_is_small() -> None:
    config = json.loads((READER / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert "auto_map" not in config  # no code of ours is needed to load it
    model = AutoModelForCausalLM.from_pretrained(READER, trust_remote_code=False)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert sum(f.stat().st_size for f in READER.iterdir()) <= 10_000_000


def test_every_value_of_the_clinic_is_one_token_for_it() -> None:
    tokenizer = AutoTokenizer.from_pretrained(READER)
    for category in words.CATEGORIES:
        for word in (*category.fields, *category.values):
            assert len(tokenizer.encode(f" {word}", add_special_tokens=False)) == 1, word
    for remark in words.REMARKS:
        assert len(tokenizer.encode(remark)) == len(remark.split()), remark
