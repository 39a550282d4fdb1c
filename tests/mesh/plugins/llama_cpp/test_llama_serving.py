"""`forge ask` and `forge serve` on llama.cpp, over a model that is kept as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from gguf_setup import drawn, llama, trained_pieces, write_gguf
from openai import OpenAI
from served import serve_command

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.learning.model.loading import load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.library.base_models.kept import add_model
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge
from cartridge_forge.protocols.files import models_folder

MESH = Path(__file__).parents[4] / "meshes/serve.yaml"
CHART = "the apples of the cafe"
QUESTION = "lines and spaces"


def test_a_kept_gguf_file_answers_without_whole_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORGE_HOME", str(tmp_path / "home"))
    network, pieces = drawn(llama), trained_pieces()
    network.resize_token_embeddings(pieces.get_piece_size())
    add_model(str(write_gguf(tmp_path / "tiny.gguf", "llama", network, pieces)))
    model = models_folder() / "tiny"
    weights = model / "model.safetensors"
    assert not weights.exists()

    library = CartridgeStore(tmp_path / "library", base := read_base(model))
    ids = ChatRenderer(load_tokenizer(str(model)), {"d": CHART}).head("d")
    kv = document_kv(load_model(str(model)), ids)
    kv = kv + 0.1 * torch.randn(kv.shape, generator=torch.Generator().manual_seed(3))
    add_cartridge(library, "ward", made_for(CartridgeFile(kv, 1), base), {})
    weights.unlink()  # which loading the model has written

    sets = [f"model.path={model}", f"library={library.directory}"]
    answers = {}
    for backend in ("llama.cpp", "torch"):
        words = [w for s in (*sets, f"generator.backend={backend}") for w in ("--set", s)]
        asked = ["ask", "ward", QUESTION, "--serve", str(MESH), "--json", "--max-tokens", "12"]
        assert forge([*asked, *words]) == 0
        answers[backend] = json.loads(capsys.readouterr().out)
        assert weights.exists() == (backend == "torch")
    assert answers["llama.cpp"] == answers["torch"]
    assert answers["torch"]["tokens"] == 12
    weights.unlink()

    served = {}
    for backend in ("llama.cpp", "torch"):
        one_generator = ["name=tiny", "roles.generator.replicas=1", "spares=0"]
        serving = [*sets, *one_generator, f"generator.backend={backend}"]
        with (
            serve_command(tmp_path, *serving) as (_, url, _),
            OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            reply = client.chat.completions.create(
                model="tiny+ward", messages=[{"role": "user", "content": QUESTION}], max_tokens=12,
                temperature=0,
            )  # fmt: skip
        facts = (reply.model_extra or {})["forge"]
        assert (facts["cartridge"]["name"], facts["cartridge"]["version"]) == ("ward", 1)
        assert facts["cartridge_tokens"] == len(ids)
        served[backend] = reply.choices[0].message.content
        assert weights.exists() == (backend == "torch")
    assert served["llama.cpp"] == served["torch"]
