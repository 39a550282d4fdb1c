"""Cartridges of any shape, for tests of the formats."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from cartridge_forge.learning.attention import FlatAttention
from cartridge_forge.learning.checkpoint import CARTRIDGE, Checkpoint, part_name
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import DTYPES, CartridgeFile, Provenance
from cartridge_forge.plugins.library.formats.convert import FORMATS
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge

SUFFIX = {"forge": "", "hazy": ".pt", "peft": "", "tokasaurus": ""}
ROPE = {"rope_theta": 500000.0, "rope_type": "llama3", "factor": 8.0}


def cartridge(
    layers: int = 2, heads: int = 2, tokens: int = 16, head_dim: int = 4, *,
    dtype: str = "float32", frozen: int = 1, seed: int = 0, facts: Provenance | None = None,
) -> CartridgeFile:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randn(layers, 2, heads, tokens, head_dim, generator=generator)
    told = Provenance(
        base="models/some", config_sha256="c" * 64, weights_sha256="w" * 64,
        weights_dtype="float32", rope=ROPE, source={"run": "r1", "metrics": {"kl": 0.5}},
    )  # fmt: skip
    return CartridgeFile(kv.to(DTYPES[dtype]), frozen, told if facts is None else facts)


def place(folder: Path, name: str) -> Path:
    return folder / f"{name}{SUFFIX[name]}"


def write(made: CartridgeFile, folder: Path, name: str) -> Path:
    """Write it in a format; returns where."""
    path = place(folder, name)
    FORMATS[name].write(made, path, False)
    return path


def same(a: CartridgeFile, b: CartridgeFile) -> bool:
    """Bit by bit, -0.0 and 0.0 apart."""
    return (
        a.kv.dtype == b.kv.dtype
        and a.kv.shape == b.kv.shape
        and a.kv.contiguous().view(torch.uint8).equal(b.kv.contiguous().view(torch.uint8))
        and (a.frozen, a.facts) == (b.frozen, b.facts)
    )


def files_of(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.iterdir())


_texts = st.text(max_size=8)
_sources = st.dictionaries(
    _texts, st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(-1e9, 1e9) | _texts,
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_texts, inner, max_size=2),
        max_leaves=3,
    ), max_size=3,
)  # fmt: skip


@st.composite
def cartridges(draw: st.DrawFn) -> CartridgeFile:
    """Any shape, dtype, frozen tokens and provenance."""
    sizes = st.integers(1, 3)
    tokens = draw(st.integers(1, 20))
    facts = Provenance(
        base=draw(_texts), config_sha256=draw(_texts), weights_sha256=draw(_texts),
        rope=draw(st.sampled_from([{}, ROPE])), first_position=draw(st.integers(0, 2)),
        source=draw(_sources),
    )  # fmt: skip
    return cartridge(
        draw(sizes), draw(sizes), tokens, draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(sorted(DTYPES))), frozen=draw(st.integers(0, tokens - 1)),
        seed=draw(st.integers(0, 999)), facts=facts,
    )  # fmt: skip


def checkpoint_of(facts: Mapping[str, Any], stacked: Mapping[str, Tensor]) -> Checkpoint:
    """A checkpoint of the facts "names" and "version" (with any others) and of `stacked`: `frozen`
    and `trainable` [C, L, 2, H_kv, F or P-F, D]."""
    version = facts["version"]
    parts = {
        part_name(CARTRIDGE, i, version): {k: part[i] for k, part in stacked.items()}
        for i in range(len(facts["names"]))
    }
    own = {name: {"since": version} for name in facts["names"]}
    return Checkpoint({**facts, "cartridges": own}, parts)


def wards(home: Path) -> CartridgeStore:
    """A library with five versions of `ward`, one of `desk`."""
    made = CartridgeStore(home, BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE))
    for name, seed in (*(("ward", seed) for seed in range(5)), ("desk", 9)):
        add_cartridge(made, name, cartridge(seed=seed), {})
    return made


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
