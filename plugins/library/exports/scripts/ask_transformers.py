"""Ask the cartridge in this folder with transformers: python ask.py "QUESTION" [--model DIR]."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

FOLDER = Path(__file__).resolve().parent


def load_cache(model: Any, folder: Path = FOLDER) -> DynamicCache:
    """Return a cache that holds the cartridge, in the model's type and on its device. `generate`
    appends to it: load one for each conversation."""
    tensors = load_file(folder / "cache.safetensors")
    cache = DynamicCache(config=model.config)
    for layer in range(len(tensors) // 2):
        keys, values = tensors[f"keys.{layer}"], tensors[f"values.{layer}"]
        cache.update(
            keys.to(model.device, model.dtype), values.to(model.device, model.dtype), layer
        )
    return cache


def answer_ids(
    model: Any, prompt_ids: Sequence[int], folder: Path = FOLDER, **options: Any
) -> list[int]:
    """Return the ids that the model writes greedily behind the cartridge and a prompt; `options`
    are those of `generate`, such as max_new_tokens."""
    cache = load_cache(model, folder)
    ids = torch.tensor([list(prompt_ids)], device=model.device)
    # The mask covers the cartridge too, so that the prompt begins at position P.
    mask = ids.new_ones(1, cache.get_seq_length() + ids.shape[1])
    settings = {"do_sample": False, **options}
    reply = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    answer: list[int] = reply[0, ids.shape[1] :].tolist()
    return answer


def main() -> None:
    facts = json.loads((FOLDER / "export.json").read_text())
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--model", default=facts["model"])
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=facts["weights_dtype"])
    question_ids = tokenizer(options.question, add_special_tokens=False).input_ids
    prompt_ids = [*facts["before"], *question_ids, *facts["after"]]
    ids = answer_ids(model, prompt_ids, max_new_tokens=options.max_tokens)
    print(tokenizer.decode(ids, skip_special_tokens=True))


if __name__ == "__main__":
    main()
