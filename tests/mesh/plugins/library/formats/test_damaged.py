"""Test that damaged files and foreign formats are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import cartridge, files_of, write
from rooms.registry.hub_setup import SMALL, TEXTS, outcome
from safetensors.torch import save_file
from torch.nn import Parameter, ParameterList

from cartridge_forge.plugins.host.limited_process import LimitedProcess, ProcessLimits
from cartridge_forge.plugins.library.formats import hazyresearch
from cartridge_forge.plugins.library.formats.cartridge_file import (
    HEADER_BYTES,
    CartridgeFile,
    Provenance,
)
from cartridge_forge.plugins.library.formats.convert import FORMATS, detect, read
from cartridge_forge.protocols.errors import DataError


@pytest.mark.parametrize("name", FORMATS)
def test_every_damaged_number_is_found(tmp_path: Path, name: str) -> None:
    """Each byte of a key, wherever the format has it."""
    path = write(SMALL, tmp_path, name)
    (file,) = (f for f in files_of(path) if f.suffix not in TEXTS)
    whole = file.read_bytes()
    key = SMALL.kv[0, 0, 0, 1].contiguous().view(torch.uint8).numpy().tobytes()
    start = whole.find(key)
    assert start > 0
    for at in range(start, start + len(key)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert outcome(path) == "refused"


class Harm:
    """Unpickled, it makes a file: `os.system` is named in the pickle itself."""

    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.system, (f"touch {self.where}",)


def lists(part: torch.Tensor) -> ParameterList:
    return ParameterList([Parameter(p[None].clone()) for p in part])


def state(made: CartridgeFile, **more: Any) -> dict[str, Any]:
    f = made.frozen
    return {
        "trainable_keys": lists(made.kv[:, 0, :, f:]),
        "trainable_values": lists(made.kv[:, 1, :, f:]),
        "frozen_keys": lists(made.kv[:, 0, :, :f]),
        "frozen_values": lists(made.kv[:, 1, :, :f]),
    } | more


def test_the_harm_is_real(tmp_path: Path) -> None:
    """Loaded plainly, as the published code does, the file does what it likes."""
    torch.save(state(SMALL, note=Harm(tmp_path / "harmed")), tmp_path / "c.pt")
    torch.load(tmp_path / "c.pt", weights_only=False)
    assert (tmp_path / "harmed").exists()


@pytest.mark.parametrize("where", ["value", "tensor list", "key", "the whole"])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, where: str) -> None:
    harm = Harm(tmp_path / "harmed")
    made: Any = {
        "value": state(SMALL, note=harm),
        "tensor list": state(SMALL, frozen_keys=[harm]),
        "key": {**state(SMALL), (1, harm): 0},
        "the whole": harm,
    }[where]
    torch.save(made, tmp_path / "c.pt")
    with pytest.raises(DataError, match=r"c.pt is refused: .*system"):
        read(tmp_path / "c.pt")
    folder = tmp_path / "tokasaurus"
    write(SMALL, tmp_path, "tokasaurus")
    shutil.copy(tmp_path / "c.pt", folder / "cartridge.pt")
    with pytest.raises(DataError, match=r"cartridge.pt is refused"):
        read(folder)
    assert not (tmp_path / "harmed").exists()


def test_no_other_pickle_is_opened_at_all(tmp_path: Path) -> None:
    harm = Harm(tmp_path / "harmed")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(harm))
    torch.save(harm, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("plain.pt", "old.pt"):
        with pytest.raises(DataError, match="is refused: BadZipFile"):
            read(tmp_path / name)
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(
        (write(SMALL, tmp_path, "peft") / "adapter_config.json").read_text()
    )
    torch.save({"prompt_embeddings": harm}, folder / "adapter_model.bin")
    with pytest.raises(DataError, match=r"adapter_model.bin is a pickle and is not read"):
        read(folder)
    assert not (tmp_path / "harmed").exists()


def test_a_yaml_that_builds_objects_is_refused(tmp_path: Path) -> None:
    path = write(SMALL, tmp_path, "tokasaurus")
    (path / "config.yaml").write_text(
        f"kv_cache_initializer: !!python/object/apply:os.system ['touch {tmp_path}/harmed']\n"
    )
    with pytest.raises(DataError, match=r"no readable config.yaml"):
        read(path)
    assert not (tmp_path / "harmed").exists()


def test_a_zip_that_swells_is_refused(tmp_path: Path) -> None:
    write(SMALL, tmp_path, "hazy")
    with (
        zipfile.ZipFile(tmp_path / "hazy.pt") as stored,
        zipfile.ZipFile(tmp_path / "c.pt", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for name in stored.namelist():
            packed.writestr(name, stored.read(name))
    with pytest.raises(DataError, match="parts are compressed"):
        read(tmp_path / "c.pt")
    huge = [torch.zeros(1).expand(1, 2**20, 2**20, 64)]
    keys = ("trainable_keys", "trainable_values", "frozen_keys", "frozen_values")
    torch.save(dict.fromkeys(keys, huge), tmp_path / "huge.pt")
    with pytest.raises(DataError, match="trainable_keys claims 281474976710656 bytes"):
        read(tmp_path / "huge.pt")


def swapped(made: CartridgeFile, *keys: str) -> dict[str, Any]:
    whole = state(made)
    for key in keys or tuple(whole):
        whole[key] = [tensor.detach().transpose(1, 2).clone() for tensor in whole[key]]
    return whole


TWO = cartridge(2, 2, 8, 4, frozen=1, facts=Provenance())


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (swapped(TWO), r"tokens in axis 1: swap axes 1 and 2"),
        (swapped(TWO, "frozen_keys", "frozen_values"), "may differ in axis 2, the tokens, alone"),
        (state(TWO, frozen_keys=[t[0] for t in state(TWO)["frozen_keys"]]),
         r"frozen_keys\[0\] has the shape \[2, 1, 4\]; each layer is \[1, H_kv, tokens, D\]"),
        (state(TWO, trainable_keys=lists(torch.zeros(1, 2, 7, 4))),
         "trainable_values has 2 layers, trainable_keys 1"),
        (state(TWO, trainable_values=lists(torch.zeros(2, 2, 6, 4))),
         r"trainable_values\[0\] is \[1, 2, 6, 4\]"),
        (state(TWO, trainable_values=lists(torch.zeros(2, 2, 7, 4).bfloat16())),
         "is torch.bfloat16, trainable_keys"),
        (state(TWO, trainable_keys=ParameterList([])), "trainable_keys has no layers"),
        (state(TWO, trainable_keys="kv"), "trainable_keys .*it is a str"),
        (state(TWO, fixed_keys=lists(torch.ones(2, 2, 1, 4)), fixed_values=ParameterList([])),
         "frozen_keys and fixed_keys are both there and differ"),
        ({k: v for k, v in state(TWO).items() if "frozen" not in k}, "this file has trainable_k"),
        ({"kv": TWO.kv}, "a list of tensors trainable_keys .*this file has kv"),
        (state(TWO, trainable_keys=lists(torch.full((2, 2, 7, 4), float("nan")))), "not finite"),
        ({k: [t.detach().double() for t in v] for k, v in state(TWO).items()}, "of torch.float64"),
        ({k: [t.detach().to_sparse() for t in v] for k, v in state(TWO).items()}, "sparse"),
        ([TWO.kv], "it holds a list and no dict"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(tmp_path: Path, made: Any, said: str) -> None:
    torch.save(made, tmp_path / "c.pt")
    with pytest.raises(DataError, match=said):
        read(tmp_path / "c.pt")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"peft_type": "LORA"}, "of type LORA; adapters of type CARTRIDGE and PREFIX_TUNING"),
        ({"num_layers": 3}, r"says \[16, 3 layers \* 2 \* 2\]"),
        ({"num_virtual_tokens": 15}, r"is \[16, 4\]"),
        ({"num_frozen_tokens": 2}, "does not match its checksum"),
        ({"num_attention_heads": 2}, "does not match its checksum"),  # 2 heads of 1 are 1 of 2
        ({"token_dim": None}, "says token_dim: None"),
        ({"num_transformer_submodules": 2}, "for 2 transformers"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    path = write(SMALL, tmp_path, "peft")
    config = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(DataError, match=said):
        read(path)


def test_a_config_of_another_cartridge_is_refused(tmp_path: Path) -> None:
    path = write(SMALL, tmp_path, "tokasaurus")
    (path / "config.yaml").write_text("kv_cache_initializer: {max_tokens: 2048}\n")
    with pytest.raises(DataError, match=r"says max_tokens: 2048, and cartridge.pt holds 16"):
        read(path)


def test_a_swapped_file_does_not_match_its_manifest(tmp_path: Path) -> None:
    path = write(SMALL, tmp_path, "forge")
    save_file({"kv": SMALL.kv}, path / "cartridge.safetensors")
    with pytest.raises(DataError, match="does not match its checksum"):
        read(path)


@pytest.mark.parametrize(
    ("kv", "frozen", "said"),
    [
        (torch.zeros(2, 2, 1, 3), 0, r"shape \[L, 2, H_kv, P, D\].*got \[2, 2, 1, 3\]"),
        (torch.zeros(2, 3, 1, 3, 4), 0, "keys and values of each layer"),
        (torch.zeros(2, 2, 1, 0, 4), 0, "keys and values of each layer"),
        (torch.zeros(2, 2, 1, 3, 4), 3, r"0 <= frozen < P=3: got 3"),
        (torch.zeros(2, 2, 1, 3, 4), -1, "got -1 frozen"),
        (torch.zeros(2, 2, 1, 3, 4).double(), 0, "got torch.float64"),
        (torch.full((2, 2, 1, 3, 4), float("inf")), 0, "layer 0 .* not finite"),
    ],
)
def test_no_cartridge_is_made_of_less(kv: torch.Tensor, frozen: int, said: str) -> None:
    with pytest.raises(DataError, match=said):
        CartridgeFile(kv, frozen)


def test_what_is_no_cartridge_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing at"):
        detect(tmp_path / "gone")
    (tmp_path / "c.gguf").write_text("GGUF")
    for path in (tmp_path / "c.gguf", tmp_path):
        with pytest.raises(DataError, match="is no cartridge: give"):
            detect(path)


def test_a_header_that_is_too_long_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    text = b'{"__metadata__": {"a": "' + b"x" * HEADER_BYTES + b'"}}'
    (tmp_path / "c.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(DataError, match="a cartridge's has at most"):
        read(tmp_path / "c.safetensors")


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = write(SMALL, tmp_path, name)
    for file in files_of(path):
        whole = file.read_bytes()
        lengths = range(len(whole))
        for length in random.Random(f"cut/{name}").sample(lengths, min(120, len(whole))):
            file.write_bytes(whole[:length])
            # A text may say all that is read of it before it ends.
            assert outcome(path) == "refused" or file.suffix in TEXTS, (file.name, length)
        file.unlink()
        with pytest.raises(DataError):
            read(path)
        file.write_bytes(whole)
    assert outcome(path) == "same"


@pytest.mark.parametrize("name", FORMATS)
def test_a_damaged_byte_is_refused_or_changes_nothing(tmp_path: Path, name: str) -> None:
    """Nothing is read of a zip's padding and dates, nor of white space."""
    path, draws = write(SMALL, tmp_path, name), random.Random(f"damage/{name}")
    for file in files_of(path):
        whole = file.read_bytes()
        told = []
        for at in draws.sample(range(len(whole)), min(200, len(whole))):
            damaged = bytes([whole[at] ^ draws.randrange(1, 256)])
            file.write_bytes(whole[:at] + damaged + whole[at + 1 :])
            told.append(outcome(path))
        assert "refused" in told
        assert "bare" not in told or name == "peft"
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "file"),
    [("forge", "manifest.json"), ("peft", "adapter_config.json"), ("tokasaurus", "config.yaml")],
)
def test_a_text_nested_without_end_is_refused(tmp_path: Path, name: str, file: str) -> None:
    path = write(SMALL, tmp_path, name)
    (path / file).write_text("[" * (2_000 if name == "tokasaurus" else 100_000))
    with pytest.raises(DataError, match=f"no readable {file}"):
        read(path)
    save_file({"kv": SMALL.kv}, tmp_path / "c.safetensors", metadata={"forge": "[" * 200_000})
    with pytest.raises(DataError, match="says of itself cannot be read"):
        read(tmp_path / "c.safetensors")


def test_a_pickle_that_hashes_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tuple of two equal tuples, forty deep, takes 2**40 steps to be a dict's key."""
    deep: Any = ()
    for _ in range(40):
        deep = (deep, deep)
    # A dict of it would take as long to make: the pickle is written by hand.
    body = pickle.dumps(deep, protocol=2)[:-1]
    with zipfile.ZipFile(tmp_path / "c.pt", "w") as file:
        file.writestr("c/data.pkl", b"\x80\x02}" + body[2:] + b"K\x01s.")
        file.writestr("c/version", b"3\n")
    assert (tmp_path / "c.pt").stat().st_size < 1000
    limited = ProcessLimits(cpu_s=2, wall_s=300, memory=2**29, file_bytes=2**30)
    process = LimitedProcess(
        "cartridge_forge.plugins.library.formats.pickle_process:convert", limited
    )
    monkeypatch.setattr(hazyresearch, "PROCESS", process)
    with process, pytest.raises(DataError, match=r"c.pt is refused: it takes more than 2 s of"):
        read(tmp_path / "c.pt")
