"""Engines read what `forge export` writes: 200 greedy tokens equal ours, of every family that the
engine takes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from gguf_setup import ARCHITECTURES, SCALING, drawn, trained_pieces, write_gguf
from openai import OpenAI
from transformers import AutoModelForCausalLM
from vllm_server import exported_server

from cartridge_forge.actors.base import missing_vllm
from cartridge_forge.learning.decode import generate
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.library.base_models.kept import from_gguf
from cartridge_forge.plugins.library.exports.engines import ENGINES, export
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.response_rules import LogitRules
from cartridge_forge.protocols.step import GenerateRequest, PrefixRef, Sampling

END, TOKENS, MOST = 2, 24, 200
DOCUMENT = [1, *range(40, 90)]
DRAWS = torch.randint(3, 390, (12, 6), generator=torch.Generator().manual_seed(1))
PROMPTS = [tuple(row) for row in DRAWS.tolist()]
CERTAIN = 0.002  # of two logits whose order no rounding changes
WINDOWS = ("mistral", "gemma3")


class FamilyModel:
    """A tiny random model of a family: its GGUF file, its folder, and a cartridge for it."""

    def __init__(self, family: str, folder: Path) -> None:
        architecture, make = ARCHITECTURES[family]
        self.folder, self.gguf = folder / "model", folder / "model.gguf"
        self.folder.mkdir()
        changes = SCALING.get(family, {})
        network, pieces = drawn(make), trained_pieces()
        network.resize_token_embeddings(pieces.get_piece_size())  # llama.cpp has no padded ones
        write_gguf(self.gguf, architecture, network, pieces, **changes)
        from_gguf(self.gguf, self.folder, "float32")
        self.model = load_model(str(self.folder))
        kv = document_kv(self.model, DOCUMENT)[:, :, :, :TOKENS].float()
        noise = torch.randn(kv.shape, generator=torch.Generator().manual_seed(3))
        self.cartridge = made_for(CartridgeFile(kv + 0.1 * noise, 1), read_base(self.folder))

    def answers(self) -> dict[tuple[int, ...], list[int]]:
        """Our own greedy tokens behind the cartridge, of which none is the end, by prompt: for the
        prompts of whose tokens none was nearly another, as sums are rounded in another order."""
        requests = [
            GenerateRequest(
                f"r{i}", prompt, PrefixRef("cartridge/c", 0),
                Sampling(temperature=0.0, max_tokens=MOST), 0, logits=f"r{i}",
                rules=LogitRules(bias=((END, -100.0),)),
            )
            for i, prompt in enumerate(PROMPTS)
        ]  # fmt: skip
        drawn: list[torch.Tensor] = []
        completions = generate(
            self.model, requests, lambda _: self.cartridge.kv, frozenset(), drawn_from=drawn
        )
        chosen = {}
        for prompt, completion, logits in zip(PROMPTS, completions, drawn, strict=True):
            logits = logits.clone()
            logits[:, END] = -torch.inf
            highest = logits.topk(2).values
            if (highest[:, 0] - highest[:, 1]).min() > CERTAIN:
                chosen[prompt] = list(completion.token_ids)
        return chosen


def script_of(folder: Path) -> ModuleType:
    """The script that the export wrote."""
    spec = importlib.util.spec_from_file_location("exported_ask", folder / "ask.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("engine", ENGINES)
def test_layers_that_see_a_window_are_refused(family: str, engine: str, tmp_path: Path) -> None:
    made = FamilyModel(family, tmp_path)
    with pytest.raises(DataError, match=r"layer 0 of .* keeps a \w+ and not all positions"):
        export(made.cartridge, "ward", engine, made.folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", [name for name in ARCHITECTURES if name not in WINDOWS])
def test_every_engine_writes_our_tokens(family: str, tmp_path: Path) -> None:
    made = FamilyModel(family, tmp_path)
    answers = made.answers()
    assert len(answers) >= 2
    assert all(len(set(ids)) > 20 and len(ids) == MOST for ids in answers.values())

    export(made.cartridge, "ward", "transformers", made.folder, tmp_path / "transformers")
    theirs = AutoModelForCausalLM.from_pretrained(made.folder).eval()
    ask: Any = script_of(tmp_path / "transformers")
    for prompt, ids in answers.items():
        assert ask.answer_ids(theirs, prompt, max_new_tokens=MOST, suppress_tokens=[END]) == ids

    export(made.cartridge, "ward", "llama.cpp", made.folder, tmp_path / "llama.cpp")
    ask = script_of(tmp_path / "llama.cpp")
    server = ask.CartridgeServer(made.gguf, tmp_path / "llama.cpp", context=256, threads=1)
    options = {"n_predict": MOST, "logit_bias": [[END, False]], "return_tokens": True}
    for prompt, ids in answers.items():
        assert server.complete(prompt, **options)["tokens"] == ids


@pytest.mark.vllm
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("family", ["llama", "untied_llama", "qwen3"])  # heads of 32, its least
def test_the_server_of_vllm_writes_our_tokens(family: str, tmp_path: Path) -> None:
    """serve.sh as it was written, with the folder's own type of weights."""
    if missing_vllm():
        assert "FORGE_REQUIRE_VLLM" not in os.environ, "make test-all installs vLLM"
        pytest.skip("vLLM is not installed: make install-vllm")
    made = FamilyModel(family, tmp_path)
    answers = made.answers()
    assert len(answers) >= 2
    folder = tmp_path / "ward-vllm"
    export(made.cartridge, "ward", "vllm", made.folder, folder)
    options = ("--enforce-eager", "--kv-cache-memory-bytes", "50000000")
    named = f"{made.cartridge.facts.base}+ward"
    extra = {"return_token_ids": True, "ignore_eos": True}
    with (
        exported_server(folder / "serve.sh", tmp_path, *options) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300) as client,
    ):
        for prompt, ids in answers.items():
            reply: Any = client.completions.create(
                model=named, prompt=list(prompt), max_tokens=MOST, temperature=0,
                logit_bias={str(END): -100}, extra_body=extra,
            )  # fmt: skip
            assert reply.choices[0].token_ids == ids
            assert reply.usage.prompt_tokens == TOKENS + len(prompt)
