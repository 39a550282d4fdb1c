"""PEFT itself loads our export and says what we say; what it saves is read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import write
from logits_setup import PROMPT, READER, TOKENS, our_logits, trained

from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import read

Told = dict[str, Any]


@pytest.fixture(scope="module")
def made() -> CartridgeFile:
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
def told(made: CartridgeFile, tmp_path_factory: pytest.TempPathFactory) -> tuple[Told, Path]:
    """What PEFT says of our export, in its own process; and an adapter that it saved itself."""
    folder = tmp_path_factory.mktemp("peft")
    exported, saved = write(made, folder, "peft"), folder / "saved"
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
def test_peft_gives_our_logits(made: CartridgeFile, told: tuple[Told, Path], way: str) -> None:
    logits = torch.tensor(told[0][way])
    torch.testing.assert_close(logits, our_logits(made), rtol=1e-4, atol=1e-4)


def test_peft_trains_all_but_the_frozen_tokens(told: tuple[Told, Path]) -> None:
    assert told[0]["trainable"] == [TOKENS - 1]


def test_peft_goes_on_where_we_would(made: CartridgeFile, told: tuple[Told, Path]) -> None:
    first = int(our_logits(made)[0, -1].argmax())
    assert told[0]["continued"][: PROMPT.shape[1] + 1] == [*PROMPT[0].tolist(), first]


def test_an_adapter_that_peft_saved_is_read(made: CartridgeFile, told: tuple[Told, Path]) -> None:
    again = read(told[1])
    assert again.frozen == 2
    assert again.facts.base == str(READER)
    assert torch.equal(again.kv, made.kv)


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


def test_an_export_has_the_same_bytes_in_every_process(made: CartridgeFile, tmp_path: Path) -> None:
    source = write(made, tmp_path, "forge")
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
