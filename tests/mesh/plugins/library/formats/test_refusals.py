"""What is cut, damaged, of another kind or made to do harm is refused by name, and nothing runs."""

from __future__ import annotations

import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
from format_setup import files_of, write
from rooms.registry.refusals_setup import SMALL, TEXTS, outcome
from safetensors.torch import save_file

from cartridge_forge.plugins.library.formats import hazyresearch
from cartridge_forge.plugins.library.formats.convert import FORMATS, read
from cartridge_forge.plugins.sandbox.limited_process import LimitedProcess, ProcessLimits
from cartridge_forge.protocols.errors import DataError


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
