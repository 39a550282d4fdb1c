"""Test that formats keep cartridges: round trips, logits, PEFT."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import (
    PROMPT,
    READER,
    TOKENS,
    cartridge,
    cartridges,
    our_logits,
    place,
    plain,
    same,
    trained,
    write,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.nn import ParameterList
from transformers import DynamicCache

from cartridge_forge.plugins.library.formats import convert as conversion
from cartridge_forge.plugins.library.formats.base_model import config_hash, misfits, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.formats.convert import FORMATS, convert, detect, losses, read
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


@settings(max_examples=15, deadline=None)
@given(made=cartridges())
def test_every_format_gives_it_back(made: CartridgeFile) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name in FORMATS:
            path = write(made, Path(folder), name)
            assert detect(path) == name
            assert same(read(path), made), name
        assert len(list(Path(folder).iterdir())) == len(FORMATS)  # and nothing else is left


@settings(max_examples=12, deadline=None)
@given(made=cartridges(), order=st.permutations(sorted(FORMATS)))
def test_a_chain_of_conversions_loses_nothing(made: CartridgeFile, order: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        last = made
        for name in order:
            convert(last, place(Path(folder), name), name)
            last = read(place(Path(folder), name))
        assert same(last, made)


@pytest.fixture(scope="module")
def for_logits() -> CartridgeFile:
    return trained()


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_logits_from_every_format(
    for_logits: CartridgeFile, name: str, tmp_path: Path
) -> None:
    again = read(write(for_logits, tmp_path, name))
    assert misfits(again, read_base(READER)) == []
    assert torch.equal(our_logits(again), our_logits(for_logits))


@torch.no_grad()
def test_hazyresearchs_lists_as_a_cache_of_plain_transformers(
    for_logits: CartridgeFile, tmp_path: Path
) -> None:
    """Their own attention puts [frozen, trainable] before the prompt's keys, and no more."""
    with torch.serialization.safe_globals([ParameterList]):
        state = torch.load(write(for_logits, tmp_path, "hazy"), weights_only=True)
    filled = DynamicCache()
    for layer in range(for_logits.layers):
        keys, values = (
            torch.cat([state[f"fixed_{kind}"][layer], state[f"trainable_{kind}"][layer]], dim=2)
            for kind in ("keys", "values")
        )
        filled.update(keys, values, layer)
    positions = torch.arange(TOKENS, TOKENS + PROMPT.shape[1])[None]
    logits = plain()(PROMPT, position_ids=positions, past_key_values=filled).logits
    torch.testing.assert_close(logits, our_logits(for_logits), rtol=1e-4, atol=1e-4)


def test_a_base_is_recognised(for_logits: CartridgeFile) -> None:
    config = json.loads((READER / "config.json").read_bytes())
    assert for_logits.facts.config_sha256 == config_hash(config)
    assert for_logits.facts.rope == {"rope_theta": 500000.0, "rope_type": "default"}


Told = dict[str, Any]


@pytest.fixture(scope="module")
def for_peft() -> CartridgeFile:
    return trained()


PEFT = """
import json, sys, torch
from pathlib import Path
from peft import CartridgeConfig, PeftModel, get_peft_model
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM

reader, exported, saved, prompt = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
fresh = lambda: AutoModelForCausalLM.from_pretrained(reader, dtype=torch.float32).eval()
told = {}
with torch.no_grad():
    loaded = PeftModel.from_pretrained(fresh(), exported).eval()
    told["from_pretrained"] = loaded(torch.tensor(prompt)).logits.tolist()
    told["continued"] = loaded.generate(
        input_ids=torch.tensor(prompt), max_new_tokens=4, do_sample=False,
        attention_mask=torch.ones(1, len(prompt[0]), dtype=torch.long),
    )[0].tolist()
    config = CartridgeConfig.from_pretrained(exported)
    config.inference_mode = False
    model = get_peft_model(fresh(), config).eval()
    encoder = model.prompt_encoder["default"]
    encoder.load_prompt_embeddings(load_peft_weights(exported)["prompt_embeddings"])
    told["get_peft_model"] = model(torch.tensor(prompt)).logits.tolist()
    told["trainable"] = [p.shape[0] for p in encoder.parameters() if p.requires_grad]
    own = get_peft_model(fresh(), CartridgeConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=24, num_frozen_tokens=2))
    embeddings = load_peft_weights(exported)["prompt_embeddings"]
    own.prompt_encoder["default"].load_prompt_embeddings(embeddings)
    own.save_pretrained(saved)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(for_peft: CartridgeFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, Path]:
    """What PEFT says of our export, in its own process; and an adapter that it saved itself."""
    folder = tmp_path_factory.mktemp("peft")
    exported, saved = write(for_peft, folder, "peft"), folder / "saved"
    done = subprocess.run(
        [sys.executable, "-c", PEFT, str(READER), str(exported), str(saved),
         json.dumps(PROMPT.tolist())],
        capture_output=True, text=True, timeout=240, check=False,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Unexpected keyword" not in done.stderr
    return json.loads(done.stdout.splitlines()[-1]), saved


@pytest.mark.parametrize("way", ["from_pretrained", "get_peft_model"])
def test_peft_gives_our_logits(for_peft: CartridgeFile, told: tuple[Told, Path], way: str) -> None:
    logits = torch.tensor(told[0][way])
    torch.testing.assert_close(logits, our_logits(for_peft), rtol=1e-4, atol=1e-4)


def test_peft_trains_all_but_the_frozen_tokens(told: tuple[Told, Path]) -> None:
    assert told[0]["trainable"] == [TOKENS - 1]


def test_peft_goes_on_where_we_would(for_peft: CartridgeFile, told: tuple[Told, Path]) -> None:
    first = int(our_logits(for_peft)[0, -1].argmax())
    assert told[0]["continued"][: PROMPT.shape[1] + 1] == [*PROMPT[0].tolist(), first]


def test_an_adapter_that_peft_saved_is_read(
    for_peft: CartridgeFile, told: tuple[Told, Path]
) -> None:
    again = read(told[1])
    assert again.frozen == 2
    assert again.facts.base == str(READER)
    assert torch.equal(again.kv, for_peft.kv)


PREFIX = """
import json, sys, torch
from peft import PeftModel, PrefixTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

reader, folder, prompt = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
fresh = lambda: AutoModelForCausalLM.from_pretrained(reader, dtype=torch.float32)
torch.manual_seed(0)
projected = {"prefix_projection": True, "encoder_hidden_size": 48}
for name, more in (("plain", {}), ("projected", projected)):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7, **more)
    model = get_peft_model(fresh(), config)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        model(prompt, labels=prompt).loss.backward()
        optimizer.step()
    model.save_pretrained(f"{folder}/{name}")
    loaded = PeftModel.from_pretrained(fresh(), f"{folder}/{name}").eval()
    with torch.no_grad():
        print(json.dumps([name, loaded(prompt).logits.tolist()]))
"""


def test_prefix_tuning_is_read_with_the_logits_that_peft_has(tmp_path: Path) -> None:
    """PEFT trains it, with and without a projection, saves it and loads it in its own process."""
    done = subprocess.run(
        [sys.executable, "-c", PREFIX, str(READER), str(tmp_path), json.dumps(PROMPT.tolist())],
        capture_output=True, text=True, timeout=240, check=False,
        env={"HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert sorted(rows) == ["plain", "projected"]
    for name, theirs in rows.items():
        cartridge = read(tmp_path / name)
        assert (cartridge.tokens, cartridge.frozen) == (7, 0)
        torch.testing.assert_close(
            torch.tensor(theirs), our_logits(cartridge), rtol=1e-4, atol=1e-4
        )


def test_an_export_has_the_same_bytes_in_every_process(
    for_peft: CartridgeFile, tmp_path: Path
) -> None:
    source = write(for_peft, tmp_path, "forge")
    code = (
        "import sys; from pathlib import Path; "
        "from cartridge_forge.plugins.library.formats.convert import read; "
        "from cartridge_forge.plugins.library.formats.peft import save; "
        "save(read(Path(sys.argv[1])), Path(sys.argv[2]))"
    )
    contents = set()
    for number in range(6):
        target = tmp_path / f"export{number}"
        subprocess.run([sys.executable, "-c", code, str(source), str(target)], check=True)
        contents.add((target / "adapter_model.safetensors").read_bytes())
    assert len(contents) == 1
