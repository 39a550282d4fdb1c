"""Other engines read what `forge export` writes: 200 greedy tokens equal ours, of every family."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf_setup import ARCHITECTURES, SCALING, drawn, trained_pieces, write_gguf
from transformers import AutoModelForCausalLM

from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.base_models.kept import from_gguf
from cartridge_forge.plugins.library.exports.engines import export
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.logit_rules import LogitRules
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

END, TOKENS, MOST = 2, 24, 200
DOCUMENT = [1, *range(40, 90)]
PROMPTS = [(300, 11, 45, 210, 90, 7), (1, 77, 301)]
WINDOWS = ("mistral", "gemma3")


class FamilyModel:
    """A tiny random model of a family: its GGUF file, its folder, and a cartridge for it."""

    def __init__(self, family: str, folder: Path) -> None:
        architecture, make = ARCHITECTURES[family]
        self.folder, self.gguf = folder / "model", folder / "model.gguf"
        self.folder.mkdir()
        changes = SCALING.get(family, {})
        write_gguf(self.gguf, architecture, drawn(make), trained_pieces(), **changes)
        from_gguf(self.gguf, self.folder, "float32")
        self.model = load_model(str(self.folder))
        kv = document_kv(self.model, DOCUMENT)[:, :, :, :TOKENS].float()
        noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(3))
        self.cartridge = made_for(CartridgeFile(kv + 0.1 * noise, 1), read_base(self.folder))

    def ids(self, prompt: Sequence[int], dtype: torch.dtype = torch.float32) -> list[int]:
        """Our own greedy tokens, of which none is the end."""
        request = GenerateRequest(
            "r", tuple(prompt), PrefixRef("cartridge/c", 0),
            Sampling(temperature=0.0, max_tokens=MOST), 0, rules=LogitRules(bias=((END, -100.0),)),
        )  # fmt: skip
        kv = self.cartridge.kv.to(dtype).float()
        (completion,) = generate(self.model, [request], lambda _: kv, frozenset())
        return list(completion.token_ids)


def script_of(folder: Path) -> ModuleType:
    """The script that the export wrote."""
    spec = importlib.util.spec_from_file_location("exported_ask", folder / "ask.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=ARCHITECTURES)
def family(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_every_engine_writes_our_tokens(family: str, tmp_path: Path) -> None:
    made = FamilyModel(family, tmp_path)
    wanted = [made.ids(prompt) for prompt in PROMPTS]
    assert all(len(set(ids)) > 20 and len(ids) == MOST for ids in wanted)

    export(made.cartridge, "ward", "transformers", made.folder, tmp_path / "transformers")
    theirs = AutoModelForCausalLM.from_pretrained(made.folder).eval()
    ask: Any = script_of(tmp_path / "transformers")
    options = {"max_new_tokens": MOST, "suppress_tokens": [END]}
    assert [ask.answer_ids(theirs, prompt, **options) for prompt in PROMPTS] == wanted

    if family in WINDOWS:
        for engine, name in (("llama.cpp", "llama.cpp"), ("vllm", "vLLM")):
            with pytest.raises(DataError, match=rf"layer 0 .* SlidingWindowLayer .* {name} has"):
                export(made.cartridge, "ward", engine, made.folder, tmp_path / engine)
        return
    export(made.cartridge, "ward", "llama.cpp", made.folder, tmp_path / "llama.cpp")
    ask = script_of(tmp_path / "llama.cpp")
    server = ask.CartridgeServer(made.gguf, tmp_path / "llama.cpp", context=256, threads=1)
    for prompt, ids in zip(PROMPTS, wanted, strict=True):
        options = {"n_predict": MOST, "logit_bias": [[END, False]], "return_tokens": True}
        assert server.complete(prompt, **options)["tokens"] == ids
