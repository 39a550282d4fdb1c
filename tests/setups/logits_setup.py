"""A cartridge of the tiny reader and a prompt's logits behind one, for tests of the formats."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile

READER = Path(__file__).parents[2] / "models/clinic-reader"
DOCUMENT = [1, *range(40, 72)]
PROMPT = torch.tensor([[10, 700, 33, 1200, 5, 90]])
TOKENS = 24


@cache
def ours() -> LanguageModel:
    return load_model(str(READER))


def plain() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(READER, dtype=torch.float32)
    return model.eval()


@cache
def trained() -> CartridgeFile:
    """The first tokens of a document, pushed off what any document would give."""
    kv = document_kv(ours(), DOCUMENT)[:, :, :, :TOKENS]
    noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(3))
    return made_for(CartridgeFile(kv + 0.1 * noise, 1), read_base(READER))


@torch.no_grad()
def our_logits(cartridge: CartridgeFile) -> torch.Tensor:
    length = PROMPT.shape[1]
    positions = torch.arange(cartridge.tokens, cartridge.tokens + length)
    attention = FlatAttention([length], [1], positions, [cartridge.kv])
    logits: torch.Tensor = ours().lm_head(ours()(PROMPT[0], positions, attention))
    return logits[None]
