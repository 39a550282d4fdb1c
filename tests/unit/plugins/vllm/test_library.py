"""Cartridges of a library as vLLM's own server finds and reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, read_base
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.plugins.vllm.kv_layout import PromptCartridge
from cartridge_forge.plugins.vllm.library import CartridgeLibrary, CartridgeMisfit, open_library
from cartridge_forge.protocols.errors import DataError, SpecError

CONFIG = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "hidden_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "reader"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def store(tmp_path: Path, model: Path) -> CartridgeStore:
    return CartridgeStore(tmp_path / "library", read_base(model))


def kv(fill: float, tokens: int = 3, layers: int = 2) -> Tensor:
    return torch.full((layers, 2, 2, tokens, 8), fill)


def add(store: CartridgeStore, name: str, tensor: Tensor) -> None:
    with store.incoming() as file:
        save_file({"kv": tensor}, file)
        store.add(name, file, {})


def test_names_versions_and_tags_are_found_as_they_are_now(
    store: CartridgeStore, model: Path
) -> None:
    add(store, "a", kv(1.0, 3))
    library = CartridgeLibrary(store.directory, model, 4)
    assert library.find("a") == PromptCartridge("a", 1, 3)
    add(store, "a", kv(2.0, 5))
    store.tag(CartridgeName("a", 1), "best")
    assert library.find("a") == library.find("a@latest") == PromptCartridge("a", 2, 5)
    assert library.find("a@1") == library.find("a@best") == PromptCartridge("a", 1, 3)
    assert library.tensor("a", 1).equal(kv(1.0, 3))
    assert library.tensor("a", 2).equal(kv(2.0, 5))
    for wrong, says in (("b", "no cartridge b"), ("a@7", "no version 7"), ("a/1", "no cartridge")):
        with pytest.raises(DataError, match=says):
            library.find(wrong)


def test_what_was_used_last_is_held_and_read_once(store: CartridgeStore, model: Path) -> None:
    for name in "abc":
        add(store, name, kv(float(ord(name))))
    library = CartridgeLibrary(store.directory, model, 2)
    for name in "abac":  # c takes the place of b
        library.tensor(name, 1)
    for name in "abc":
        store.drop(name)
    assert library.tensor("a", 1).equal(kv(float(ord("a"))))
    assert library.tensor("c", 1).equal(kv(float(ord("c"))))
    with pytest.raises(DataError, match="no cartridge b"):
        library.tensor("b", 1)


def test_a_cartridge_of_another_model_is_neither_found_nor_read(
    store: CartridgeStore, model: Path
) -> None:
    large = CartridgeStore(store.directory, BaseModelInfo(3, 2, 8, 64, ""))
    add(large, "large", kv(1.0, layers=3))
    add(CartridgeStore(store.directory, BaseModelInfo(2, 2, 8, 64, "f" * 64)), "other", kv(1.0))
    library = CartridgeLibrary(store.directory, model, 2)
    with pytest.raises(CartridgeMisfit, match=r"large: .*\[2, 2, 2, P, 8\]: got \[3, 2, 2, 3, 8\]"):
        library.find("large")
    with pytest.raises(CartridgeMisfit, match=r"other: .* trained for another base model"):
        library.find("other")
    with pytest.raises(CartridgeMisfit, match=r"other@1: .* trained for another base model"):
        library.tensor("other", 1)


def test_a_damaged_file_is_not_read(store: CartridgeStore, model: Path) -> None:
    add(store, "a", kv(1.0))
    file = store.directory / "a" / "1" / "cartridge.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    library = CartridgeLibrary(store.directory, model, 2)
    with pytest.raises(DataError, match="does not match its checksum"):
        library.tensor("a", 1)


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "kv_connector_extra_config.library is missing"),
        ({"library": 3}, "kv_connector_extra_config.library is missing"),
        ({"library": "/nowhere"}, "there is no directory /nowhere; .*forge cartridges add"),
        ({"library": ".", "held": 0}, "held is a number of cartridges from 1: got 0"),
        ({"library": ".", "held": True}, "held is a number of cartridges from 1: got True"),
        ({"library": ".", "keep": 2}, "has no key keep; the keys are library and held"),
    ],
)
def test_wrong_keys_are_named(model: Path, extra: dict[str, object], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        open_library(extra, str(model), None)


def test_a_hub_model_is_checked_by_its_cached_config(
    store: CartridgeStore, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "a", kv(1.0))
    extra = {"library": str(store.directory)}
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(SpecError, match=r"no config\.json of someone/reader"):
        open_library(extra, "someone/reader", None)
    cached = tmp_path / "hub" / "models--someone--reader"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (model / "config.json").rename(cached / "snapshots" / "abc" / "config.json")
    library = open_library(extra, "someone/reader", None)
    assert library.find("a") == PromptCartridge("a", 1, 3)
    assert open_library(extra, "someone/reader", None) is library
