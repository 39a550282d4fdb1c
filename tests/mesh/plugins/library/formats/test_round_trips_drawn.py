"""Whatever a cartridge's shape, dtype and provenance: every format gives it back, bit by bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from format_setup import cartridge, place, same, write
from safetensors.torch import load_file
from torch.nn import ParameterList

from cartridge_forge.plugins.library.formats import convert as conversion
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.formats.convert import FORMATS, convert, losses, read
from cartridge_forge.protocols.errors import DataError


def test_hazyresearchs_layout_by_hand(tmp_path: Path) -> None:
    """Layer 1, head 0 of 2 positions, the first frozen, as their code reads it."""
    kv = torch.arange(2 * 2 * 1 * 2 * 3.0).view(2, 2, 1, 2, 3)
    write(CartridgeFile(kv, 1), tmp_path, "hazy")
    with torch.serialization.safe_globals([ParameterList]):
        state = torch.load(tmp_path / "hazy.pt", weights_only=True)
    for frozen in ("frozen", "fixed"):  # whichever of their readers
        assert state[f"{frozen}_keys"][1].tolist() == [[[[12.0, 13.0, 14.0]]]]
        assert state[f"{frozen}_values"][1].tolist() == [[[[18.0, 19.0, 20.0]]]]
    assert state["trainable_keys"][1].tolist() == [[[[15.0, 16.0, 17.0]]]]
    assert state["trainable_values"][0].tolist() == [[[[9.0, 10.0, 11.0]]]]
    assert not state["fixed_keys"][0].requires_grad
    assert state["trainable_keys"][0].requires_grad


@pytest.mark.parametrize("spelling", ["frozen", "fixed"])
@pytest.mark.parametrize("frozen", [0, 1, 3])
def test_hazyresearchs_own_files_are_read(tmp_path: Path, spelling: str, frozen: int) -> None:
    """Written as their `save` does: an empty list where nothing is frozen, nothing of ours."""
    made = cartridge(dtype="bfloat16", frozen=frozen, facts=Provenance())

    def lists(part: torch.Tensor) -> ParameterList:
        return ParameterList([torch.nn.Parameter(p[None].contiguous().clone()) for p in part])

    state = {}
    for axis, kind in enumerate(("keys", "values")):
        state[f"trainable_{kind}"] = lists(made.kv[:, axis, :, frozen:])
        kept = made.kv[:, axis, :, :frozen]
        state[f"{spelling}_{kind}"] = lists(kept) if frozen else ParameterList([])
    torch.save(state, tmp_path / "cache-step8.pt")
    assert same(read(tmp_path / "cache-step8.pt"), made)


def test_pefts_layout_by_hand(tmp_path: Path) -> None:
    """Row 1 is position 1: layer 0's key, its value, layer 1's both; heads side by side."""
    kv = torch.arange(2 * 2 * 2 * 2 * 1.0).view(2, 2, 2, 2, 1)
    rows = load_file(write(CartridgeFile(kv), tmp_path, "peft") / "adapter_model.safetensors")
    assert rows["prompt_embeddings"][1].tolist() == [1, 3, 5, 7, 9, 11, 13, 15]


def test_tokasaurus_finds_what_it_looks_for(tmp_path: Path) -> None:
    path = write(cartridge(), tmp_path, "tokasaurus")
    assert (path / "config.yaml").read_text() == (
        "kv_cache_initializer:\n  max_tokens: 16\n  num_frozen_tokens: 1\n"
        "model:\n  pretrained_model_name_or_path: models/some\n"
    )
    # As W&B nests them, with a tuple that the training's config has.
    (path / "config.yaml").write_text(
        "kv_cache_initializer: {value: {max_tokens: 16}}\nbetas: {value: !!python/tuple [1, 2]}\n"
    )
    assert same(read(path), cartridge())


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    old, new = cartridge(seed=1), cartridge(seed=2)
    for name in FORMATS:
        path = write(old, tmp_path, name)
        with pytest.raises(DataError, match="is there already"):
            convert(new, path, name)
        assert same(read(path), old)
        convert(new, path, name, force=True)
        assert same(read(path), new)
    for name in FORMATS:  # a file where a directory was, and the other way about
        other = "peft" if name == "hazy" else "hazy"
        convert(new, place(tmp_path, name), other, force=True)
        assert same(FORMATS[other].read(place(tmp_path, name)), new)
    assert len(list(tmp_path.iterdir())) == len(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_write_that_fails_leaves_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("cartridge_forge.protocols.files.flush", full)
    with pytest.raises(OSError, match="No space"):
        write(cartridge(), tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_this_users_alone(name: str, tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        path = write(cartridge(), tmp_path, name)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o077 == 0


def test_what_would_be_lost_is_told() -> None:
    made = cartridge(tokens=24)
    assert losses(made, "peft", None) == []
    assert losses(made, "hazy", "bfloat16") == ["numbers are rounded from float32 to bfloat16"]
    assert losses(made.to("bfloat16"), "hazy", "float32") == []
    assert "train with cartridge.tokens 16" in losses(made, "tokasaurus", None)[0]
    assert losses(cartridge(tokens=32), "tokasaurus", None) == []


def test_what_does_not_fit_a_dtype_is_refused(tmp_path: Path) -> None:
    made = CartridgeFile(torch.full((1, 2, 1, 1, 1), 1e30))
    with pytest.raises(DataError, match=r"layer 0 .* not finite"):
        convert(made, tmp_path / "c.pt", "hazy", dtype="float16")
    with pytest.raises(DataError, match="float32, bfloat16, float16: got int8"):
        convert(made, tmp_path / "c.pt", "hazy", dtype="int8")
    with pytest.raises(DataError, match="no format gguf; there are forge, hazy, peft, tokasaurus"):
        convert(made, tmp_path / "c.pt", "gguf")
    assert list(tmp_path.iterdir()) == []


def test_every_format_has_its_name() -> None:
    assert set(FORMATS) == {"forge", "hazy", "peft", "tokasaurus"}
    assert conversion.RUN not in FORMATS
