"""A cartridge says the same in every format: the model's logits behind it are equal.

HazyResearch's layout is read as a plain transformers cache, without any code of ours; PEFT reads
its own in test_peft.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from format_setup import write
from logits_setup import PROMPT, READER, TOKENS, our_logits, plain, trained
from torch.nn import ParameterList
from transformers import DynamicCache

from cartridge_forge.plugins.library.formats.base_model import config_hash, misfits, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import FORMATS, read


@pytest.fixture(scope="module")
def made() -> CartridgeFile:
    return trained()


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_logits_from_every_format(made: CartridgeFile, name: str, tmp_path: Path) -> None:
    again = read(write(made, tmp_path, name))
    assert misfits(again, read_base(READER)) == []
    assert torch.equal(our_logits(again), our_logits(made))


@torch.no_grad()
def test_hazyresearchs_lists_as_a_cache_of_plain_transformers(
    made: CartridgeFile, tmp_path: Path
) -> None:
    """Their own attention puts [frozen, trainable] before the prompt's keys, and no more."""
    with torch.serialization.safe_globals([ParameterList]):
        state = torch.load(write(made, tmp_path, "hazy"), weights_only=True)
    filled = DynamicCache()
    for layer in range(made.layers):
        keys, values = (
            torch.cat([state[f"fixed_{kind}"][layer], state[f"trainable_{kind}"][layer]], dim=2)
            for kind in ("keys", "values")
        )
        filled.update(keys, values, layer)
    positions = torch.arange(TOKENS, TOKENS + PROMPT.shape[1])[None]
    logits = plain()(PROMPT, position_ids=positions, past_key_values=filled).logits
    torch.testing.assert_close(logits, our_logits(made), rtol=1e-4, atol=1e-4)


def test_a_base_is_recognised(made: CartridgeFile) -> None:
    config = json.loads((READER / "config.json").read_bytes())
    assert made.facts.config_sha256 == config_hash(config)
    assert made.facts.rope == {"rope_theta": 500000.0, "rope_type": "default"}
