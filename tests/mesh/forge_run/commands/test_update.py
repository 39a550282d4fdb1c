"""Test `forge update`: what is refused, and the versions that it adds."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from serving_setup import READER

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.forge_run.plan.edited_cartridge import TOKENIZER
from cartridge_forge.learning.model.loading import base_hash, load_model, load_tokenizer
from cartridge_forge.learning.teacher import document_kv
from cartridge_forge.plugins.chat.renderer import ChatRenderer
from cartridge_forge.plugins.library.formats import forge as forge_format
from cartridge_forge.plugins.library.formats.base_model import read_base
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile, Provenance
from cartridge_forge.plugins.library.names import CartridgeName
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge, lineage

MESH = Path(__file__).parents[4] / "meshes/serve.yaml"
OLD = (
    "chart of oscar brandt, born 14 february, diagnosis asthma.\n"
    "note 1: oncology, 17 december. albumin 25 gram. saturation 96 percent. insulin 86 units."
)
NEW = OLD.replace("86 units", "12 units")
ADDED = "note 2: urology, 10 january. calcium 41 mmol."
TOKENS = 8


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    """A library with the cartridge `chart`: the first tokens of OLD, whose text is not kept."""
    store, model = CartridgeStore(tmp_path / "library", read_base(READER)), load_model(str(READER))
    head = ChatRenderer(load_tokenizer(str(READER)), {"chart": OLD}).head("chart")
    kv = document_kv(model, head)[:, :, :, :TOKENS]
    facts = Provenance(weights_sha256=base_hash(model), weights_dtype="float32")
    add_cartridge(store, "chart", CartridgeFile(kv, 1, facts), {"init": "first_tokens"})
    return store


def update(library: CartridgeStore, *words: str) -> int:
    code = forge([
        "update", *words, "--serve", str(MESH), "--set", f"library={library.directory}",
        "--set", f"model.path={READER}",
    ])  # fmt: skip
    assert isinstance(code, int)
    return code


def test_updates_add_versions_with_their_chain(
    library: CartridgeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = library.get(CartridgeName("chart"))
    library.keep_document(first, OLD)
    (tmp_path / "new.txt").write_text(NEW)
    (tmp_path / "added.txt").write_text(ADDED)
    assert update(library, "chart", str(tmp_path / "new.txt")) == 0
    assert capsys.readouterr().out.startswith("chart@2: 8 tokens, 1 passage of chart@1 changed, ")
    assert update(library, "chart", "--append", str(tmp_path / "added.txt")) == 0
    second, third = library.entries("chart")[1:]
    assert second.document.read_text() == NEW
    assert third.document.read_text() == f"{NEW}\n{ADDED}"
    assert dict(library.passages(third)[0])["calcium"] == 1
    hashes = [hashlib.sha256(t.encode()).hexdigest() for t in (OLD, NEW, f"{NEW}\n{ADDED}")]
    source = third.manifest.source
    (one, two) = source["updates"]
    assert [one["parent"], two["parent"]] == ["chart@1", "chart@2"]
    assert [one["old_text_sha256"], one["text_sha256"], two["text_sha256"]] == hashes
    assert two["old_text_sha256"] == hashes[1]
    at = OLD.index("insulin")
    passage = [at, at + len("insulin 86 units.")]
    assert second.manifest.source["updates"][0]["changes"] == [[*passage, *passage]]
    end = len(NEW)
    assert two["changes"] == [[end, end, end + 1, end + 1 + len(ADDED)]]
    assert "changes" not in one
    assert source["start"]["source"] == {"init": "first_tokens"}
    assert lineage(source) == [
        "chart@2 updated", "chart@1 updated", str(first.path.parent)
    ]  # fmt: skip
    before, after = (forge_format.read(e.path.parent) for e in (first, second))
    assert (after.tokens, after.frozen, after.dtype) == (TOKENS, 1, "float32")
    assert torch.equal(before.kv[..., :1, :], after.kv[..., :1, :])
    assert not torch.equal(before.kv, after.kv)


def test_what_cannot_be_updated_is_refused_with_the_remedy(
    library: CartridgeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("old", OLD), ("new", NEW), ("short", "weight")):
        (tmp_path / f"{name}.txt").write_text(text)

    def refused(*words: str) -> str:
        assert update(library, *words) == 2
        return capsys.readouterr().err

    new = str(tmp_path / "new.txt")
    assert "give that text: forge cartridges document chart@1 FILE" in refused("chart", new)
    library.keep_document(library.get(CartridgeName("chart")), OLD)
    same = refused("chart", str(tmp_path / "old.txt"))
    assert "chart@1 has this text already" in same
    assert "nothing to update" in same
    assert "--minutes must be > 0: got 0" in refused("chart", new, "--minutes", "0")
    assert "no more than the cartridge's 8" in refused("chart", str(tmp_path / "short.txt"))
    (tmp_path / "rows.jsonl").write_text('{"text": "albumin 25."}\n{"text": "sodium 41."}\n')
    assert "holds 2 texts, and a cartridge" in refused("chart", str(tmp_path / "rows.jsonl"))
    assert "there is no cartridge other" in refused("other", new)
    assert library.versions("chart") == [1]


def test_another_tokenizer_is_refused(
    library: CartridgeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = library.get(CartridgeName("chart"))
    made = forge_format.read(entry.path.parent).with_source({TOKENIZER: "9f" * 32})
    entry = add_cartridge(library, "chart", made, {})
    library.keep_document(entry, OLD)
    (tmp_path / "new.txt").write_text(NEW)
    assert update(library, "chart", str(tmp_path / "new.txt")) == 2
    told = capsys.readouterr().err
    assert "chart@2 was made with another tokenizer (9f9f9f9f9f9f, that of" in told
    assert "--set model.path=DIR" in told
