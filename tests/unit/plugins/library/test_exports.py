"""What `forge export` writes, byte by byte, and what it refuses."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from format_setup import READER, cartridge, trained, write
from safetensors.torch import load_file

from cartridge_forge.forge_run.cli import ENGINES as LISTED
from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.library.exports.engines import ENGINES, REFUSED, chat_turn, export
from cartridge_forge.plugins.library.exports.llama_session import neighbouring, write_session
from cartridge_forge.plugins.library.formats.base_model import made_for, read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.formats.convert import read
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge
from cartridge_forge.protocols.errors import DataError


def test_neighbouring_pairs_by_hand() -> None:
    assert neighbouring(torch.arange(6.0)).tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("transposed", [False, True])
def test_a_session_file_by_hand(tmp_path: Path, transposed: bool) -> None:
    """One layer, one head, two positions of two numbers: keys 0 1, 2 3; values 4 5, 6 7."""
    kv = torch.arange(8.0).view(1, 2, 1, 2, 2)
    write_session(tmp_path / "s", kv, [9, 9], interleaved=False, transposed=transposed)
    head = b"qsgg" + struct.pack("<5I", 4, 2, 9, 9, 1) + struct.pack("<I", 2)
    cells = struct.pack("<iIi", 0, 1, 0) + struct.pack("<iIi", 1, 1, 0)
    about = struct.pack("<4I", transposed, 1, 0, 0)
    keys = struct.pack("<iQ4f", 0, 8, 0, 1, 2, 3)
    values = struct.pack("<iQ4f", 0, 8, 4, 5, 6, 7)
    if transposed:
        values = struct.pack("<iII4f", 0, 4, 2, 4, 6, 5, 7)
    assert (tmp_path / "s").read_bytes() == head + cells + about + keys + values


def test_types_are_ggml_s(tmp_path: Path) -> None:
    for dtype, kind in ((torch.float16, 1), (torch.bfloat16, 30)):
        kv = torch.ones(1, 2, 1, 1, 2, dtype=dtype)
        write_session(tmp_path / "s", kv, [0], interleaved=True, transposed=False)
        data = (tmp_path / "s").read_bytes()
        at = 12 + 4 + 8 + 12 + 16
        assert struct.unpack_from("<iQ", data, at) == (kind, 4)
        assert len(data) == at + 2 * (12 + 4)


def test_the_ids_around_a_question_are_those_of_a_chat() -> None:
    """<|user|> before it, <|end|><|assistant|> behind it; the reader's chat begins with <|bos|>,
    which the cartridge has."""
    assert chat_turn(READER) == ([4], [2, 5])


def test_the_folder_of_each_engine(tmp_path: Path) -> None:
    made = trained()
    for engine in ENGINES:
        export(made, "ward", engine, READER, tmp_path / engine)
        facts = json.loads((tmp_path / engine / "export.json").read_text())
        assert (facts["tokens"], facts["before"], facts["after"]) == (24, [4], [2, 5])
        assert (tmp_path / engine / "README.md").read_text().startswith("# ward for ")
    cache = load_file(tmp_path / "transformers" / "cache.safetensors")
    assert cache["values.3"].equal(made.kv[3, 1][None])
    prompt = json.loads((tmp_path / "llama.cpp" / "request.json").read_text())["prompt"]
    assert prompt == [*[0] * 24, 4, "QUESTION", 2, 5]
    store = CartridgeStore(tmp_path / "vllm" / "library", read_base(READER))
    version = read(store.get(CartridgeName("ward")).path.parent)
    assert version.kv.equal(made.kv)


def test_the_command_lists_every_engine() -> None:
    assert set(LISTED) == {*ENGINES, *REFUSED}


def test_the_model_is_the_one_that_the_cartridge_was_made_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the library and of a path; the server's own model is another one."""
    monkeypatch.setenv("FORGE_HOME", str(tmp_path))
    kept = tmp_path / "models" / "slower"
    shutil.copytree(READER, kept)
    config = json.loads((kept / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 2
    (kept / "config.json").write_text(json.dumps(config))
    made = trained()
    made = made_for(CartridgeFile(made.kv, made.frozen), read_base(kept))
    add_cartridge(CartridgeStore(tmp_path / "library", read_base(kept)), "ward", made, {})
    for name, source in (("a", "ward"), ("b", str(write(made, tmp_path, "forge")))):
        out = tmp_path / name
        assert forge(["export", source, "--for", "transformers", "--out", str(out)]) == 0
        assert "for the model slower" in (out / "README.md").read_text()
    shutil.rmtree(kept)
    assert forge(["export", "ward", "--for", "transformers", "--out", str(tmp_path / "c")]) == 2
    assert "was trained for the model slower, which is not kept here" in capsys.readouterr().err


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", f"model.path={READER}", "--set", f"library={tmp_path / 'library'}"]
    out = tmp_path / "out"
    path = write(trained(), tmp_path, "forge")

    def mistake(source: str, engine: str, *more: str) -> str:
        assert forge(["export", source, "--for", engine, "--out", str(out), *options, *more]) == 2
        return capsys.readouterr().err

    assert "there is no cartridge nobody; the library has none" in mistake("nobody", "vllm")
    for engine, named in (("sglang", "sglang 0.5.23"), ("lmcache", "lmcache 0.5.6")):
        said = mistake(str(path), engine)
        assert named in said
        assert "--for vllm" in said
    other = write(cartridge(), tmp_path, "peft")
    assert "has the shape [4, 2, 2, P, 32]: got [2, 2, 2, 16, 4]" in mistake(str(other), "vllm")
    with pytest.raises(SystemExit):
        forge(["export", str(path), "--for", "ollama", "--out", str(out)])
    assert "invalid choice: 'ollama'" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()
    assert f"{out} is there already" in mistake(str(path), "transformers")
    assert list(out.iterdir()) == []


def test_another_type_is_written_as_it_is_asked_for(tmp_path: Path) -> None:
    path = write(trained(), tmp_path, "forge")
    command = ["export", str(path), "--for", "llama.cpp", "--out", str(tmp_path / "out")]
    assert forge([*command, "--dtype", "float16", "--set", f"model.path={READER}"]) == 0
    assert json.loads((tmp_path / "out" / "export.json").read_text())["cache_type"] == "f16"


def test_a_model_that_the_engine_cannot_hold_is_refused(tmp_path: Path) -> None:
    """Phi-3 is of no family whose order of numbers is known, YaRN of no rotation that is equal."""
    config = json.loads((READER / "config.json").read_text())
    made = trained()
    for number, (change, said) in enumerate((
        ({"model_type": "phi3"}, "of the family phi3, and the order"),
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 2.0,
                              "original_max_position_embeddings": 2048}}, "rotated by yarn"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | change))
        free = type(made)(made.kv, made.frozen)
        with pytest.raises(DataError, match=said):
            export(free, "ward", "llama.cpp", folder, tmp_path / "out")
