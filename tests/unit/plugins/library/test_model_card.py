"""A cartridge's model card."""

from __future__ import annotations

import json
from pathlib import Path

from format_setup import cartridge
from huggingface_hub import ModelCard
from rooms.registry.hub_setup import BASE

from cartridge_forge.plugins.library.model_card import UNKNOWN_LICENSE, CardFacts, model_card
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge


def test_a_card_says_what_the_cartridge_is_of(tmp_path: Path) -> None:
    library = CartridgeStore(tmp_path / "library", BASE)
    entry = add_cartridge(library, "ward", cartridge(seed=5), {"arm": "on_policy"})
    run = tmp_path / "run"
    run.mkdir()
    documents = [{"name": "secret ward", "source": "/home/me/ward.txt", "sha256": "ab" * 32}]
    (run / "documents.json").write_text(json.dumps({"documents": documents}))
    results = {
        "arms": {"none": {"accuracy": 0.25, "n": 24}, "on_policy": {"accuracy": 0.875, "n": 24}},
        "gold": {"arms": {"on_policy": {"nll": 0.1, "closed": 0.75, "ci95": [0.6, 0.9]}}},
    }
    (run / "results.json").write_text(json.dumps(results))
    text = model_card(entry, "me/ward", CardFacts("mit", "lab/base-1b"), run)
    card = ModelCard(text)
    assert card.data.base_model == "lab/base-1b"
    assert card.data.license == "mit"
    assert card.data.library_name == "cartridge-forge"
    assert "kv-cache" in (card.data.tags or [])
    assert f"- `sha256:{'ab' * 32}`" in text
    assert "| on_policy | 87.5% | 24 | 75.0% |" in text
    assert "| none | 25.0% | 24 |  |" in text
    assert "This cartridge is the arm `on_policy`." in text
    assert "forge cartridges pull me/ward --name ward" in text
    assert "secret" not in text
    assert "/home/me" not in text


def test_what_is_not_known_is_not_made_up(tmp_path: Path) -> None:
    library = CartridgeStore(tmp_path / "library", BASE)
    entry = add_cartridge(library, "ward", cartridge(seed=5), {})
    text = model_card(entry, "me/ward", run=tmp_path / "gone")
    assert ModelCard(text).data.license is None
    assert UNKNOWN_LICENSE in text
    assert "## Documents" not in text
    assert "## What it is worth" not in text
