"""Test the library of cartridges: names, versions, tags and terms."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from format_setup import checkpoint_of, wards
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from cartridge_forge.learning.checkpoint import write_checkpoint
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo, config_hash, read_base
from cartridge_forge.plugins.library.formats.forge import FILE, MANIFEST
from cartridge_forge.plugins.library.names import (
    CartridgeName,
    ModelName,
    parse_cartridge,
    parse_model,
)
from cartridge_forge.plugins.library.store import (
    INCOMING,
    RESULTS,
    CartridgeStore,
    add_finished,
    add_from_run,
    noted_run,
)
from cartridge_forge.plugins.library.terms import read_terms, write_terms
from cartridge_forge.protocols.errors import DataError
from cartridge_forge.protocols.files import sha256_of
from cartridge_forge.protocols.records.run_files import TERMS

BASE = BaseModelInfo(layers=2, kv_heads=1, head_dim=4, context=64, config_sha256="c" * 64)


def kv(tokens: int = 3, value: float = 0.5) -> torch.Tensor:
    return torch.full((2, 2, 1, tokens, 4), value)


def add(library: CartridgeStore, name: str = "p1", tensors: Any = None, **metadata: str) -> Any:
    with library.incoming() as file:
        save_file({"kv": kv()} if tensors is None else tensors, file, metadata=metadata or None)
        return library.add(name, file, {"by": "test"})


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    return CartridgeStore(tmp_path / "library", BASE)


def test_a_version_is_added_found_and_whole(library: CartridgeStore) -> None:
    first, second = add(library), add(library, tensors={"kv": kv(5)})
    assert [e.key for e in (first, second)] == [("p1", 1), ("p1", 2)]
    assert library.get(CartridgeName("p1")).key == ("p1", 2)
    found = library.get(CartridgeName("p1", 1))
    assert found.path == library.directory / "p1/1" / FILE
    assert found.manifest.sha256 == sha256_of(found.path)
    assert (found.manifest.tokens, found.manifest.shape) == (3, (2, 2, 1, 3, 4))
    assert found.manifest.source == {"by": "test"}
    assert library.names() == ["p1"]
    assert not any((library.directory / INCOMING).iterdir())


def test_a_version_keeps_its_words_until_it_is_dropped(library: CartridgeStore) -> None:
    first, second = add(library), add(library)
    library.describe(first, [{"salt": 2}])
    assert (library.passages(first), library.passages(second)) == ([{"salt": 2}], ())
    library.describe(second, [{"tide": 1}, {"reef": 4}])
    assert library.passages(library.get(CartridgeName("p1"))) == [{"tide": 1}, {"reef": 4}]
    library.drop("p1", 2)
    assert [library.passages(entry) for entry in library.entries("p1")] == [[{"salt": 2}]]


def test_a_number_is_never_used_again(library: CartridgeStore) -> None:
    add(library)
    add(library)
    assert library.drop("p1", 2) == [2]
    assert library.versions("p1") == [1]
    assert add(library).key == ("p1", 3)
    assert library.drop("p1") == [1, 3]
    assert library.names() == []
    assert add(library).key == ("p1", 4)
    again = CartridgeStore(library.directory, BASE)  # another process
    assert add(again).key == ("p1", 5)


def test_two_who_add_at_once_get_two_numbers(library: CartridgeStore) -> None:
    added: list[int] = []
    threads = [
        threading.Thread(target=lambda: added.append(add(library).manifest.version))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(added) == list(range(1, 9))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"kv": torch.zeros(3, 2, 1, 3, 4)}, r"has the shape \[2, 2, 1, P, 4\]: got \[3, 2, 1"),
        ({"kv": torch.zeros(2, 2, 1, 3)}, "has the shape"),
        ({"kv": torch.zeros(2, 2, 1, 0, 4)}, "has the shape"),
        ({"kv": kv(63)}, "leaves none of the model's 64 positions"),
        ({"kv": kv(value=float("nan"))}, "layer 0 .* not finite"),
        ({"kv": kv().long()}, "is float32, bfloat16 or float16: got torch.int64"),
        ({"keys": kv()}, 'one tensor "kv" .*: got keys'),
        ({"kv": kv(), "more": kv()}, "got kv, more"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    library: CartridgeStore, tensors: Any, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        add(library, tensors=tensors)
    assert library.names() == []
    assert not any((library.directory / INCOMING).iterdir())


def test_another_base_is_refused(library: CartridgeStore) -> None:
    with pytest.raises(DataError, match="trained for another base model"):
        add(library, base_config_sha256="d" * 64)
    assert add(library, base_config_sha256="c" * 64).key == ("p1", 1)


def test_a_pickle_is_never_loaded(library: CartridgeStore, tmp_path: Path) -> None:
    with library.incoming() as file:
        torch.save({"kv": kv()}, file)
        with pytest.raises(DataError, match="no safetensors file"):
            library.add("p1", file, {})
    with library.incoming() as file:
        file.write_bytes(b"\xff" * 64)  # a header longer than the file
        with pytest.raises(DataError, match="no safetensors file"):
            library.add("p1", file, {})


@pytest.mark.parametrize("name", ["../p1", ".p1", "", "a/b", "p" * 65, "p\0", "auto"])
def test_no_name_leads_out_of_the_library(library: CartridgeStore, name: str) -> None:
    with pytest.raises(DataError, match="is no cartridge's name"):
        add(library, name)


def test_a_path_names_a_version_within_the_library_alone(library: CartridgeStore) -> None:
    add(library)
    inside = ("p1", "p1@1", "p1@latest", "p1/1", f"p1/1/{FILE}", str(library.directory / "p1/1"))
    for text in inside:
        assert library.get(library.named(text)).key == ("p1", 1)
    outside = ("/etc/passwd", "../p1/1", "p1/1/../../..", f"p1/1/{MANIFEST}", "p1/01", "p1/\0", ".")
    for text in outside:
        with pytest.raises(DataError):
            library.named(text)


def test_a_damaged_manifest_is_named(library: CartridgeStore) -> None:
    entry = add(library)
    (entry.path.parent / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"p1@1 is damaged: .* no readable manifest\.json"):
        library.get(CartridgeName("p1"))


def test_the_hash_of_a_config_is_that_of_what_is_computed() -> None:
    config = {"hidden_size": 8, "rope": {"theta": 1}, "transformers_version": "1"}
    assert config_hash(config) == config_hash({**config, "transformers_version": "2"})
    assert config_hash(config) != config_hash({**config, "rope": {"theta": 2}})


def checkpoint(run: Path, version: int, arm: str = "on_policy") -> None:
    names, shape = ["p1", "p2"], (2, 2, 2, 1)
    facts = {"names": names, "arm": arm, "step": version, "version": version}
    tensors = {
        "frozen": torch.full((*shape, 1, 4), 1.0),
        "trainable": torch.stack(
            [torch.full((*shape[1:], 2, 4), 10.0 * version + c) for c in (1, 2)]
        ),
    }
    (run / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_checkpoint(
        run / "checkpoints", f"version-{version:06d}", checkpoint_of(facts, tensors), 3
    )


def test_the_newest_checkpoint_on_policy_of_a_run_is_added(
    library: CartridgeStore, tmp_path: Path
) -> None:
    run = tmp_path / "runs/longhealth/r1"
    checkpoint(run, 1)
    checkpoint(run, 2)
    checkpoint(run, 3, "offline")  # the baseline is trained last
    write_terms(run / TERMS, {"p1": [{"salt": 2}, {"tide": 1}]})
    one, two = add_from_run(library, run)
    assert (library.passages(one), library.passages(two)) == ([{"salt": 2}, {"tide": 1}], ())
    assert [one.key, two.key] == [("p1", 1), ("p2", 1)]
    assert one.manifest.source["checkpoint"] == "version-000002"
    kv = load_file(two.path)["kv"]
    assert kv.shape == (2, 2, 1, 3, 4)
    assert kv[0, 0, 0, :, 0].tolist() == [1.0, 22.0, 22.0]  # the frozen token, then the trained
    (renamed,) = add_from_run(library, run / "checkpoints/version-000001", {"p2": "ward"})
    assert load_file(renamed.path)["kv"][0, 0, 0, :, 0].tolist() == [1.0, 12.0, 12.0]
    assert library.names() == ["p1", "p2", "ward"]


def test_what_was_added_of_a_finished_run_is_not_added_again(
    library: CartridgeStore, tmp_path: Path
) -> None:
    """As `forge make` adds a run, under other names, and `forge cartridges add` one of several."""
    runs = tmp_path / "runs"
    for name in ("r1", "r2", "r3"):
        checkpoint(runs / "documents" / name, 1)
    add_from_run(library, runs / "documents/r3")  # while it runs
    for name in ("r1", "r2", "r3"):
        (runs / "documents" / name / RESULTS).write_text('{"status": "finished"}')
    add_from_run(library, runs / "documents/r1", {"p1": "notes.p1", "p2": "notes.p2"})
    add_from_run(library, runs / "documents/r2", {"p2": "p2"})
    assert noted_run(library.directory, "r2") == runs / "documents/r2"
    assert noted_run(library.directory, "r9") is None
    added, passed = add_finished(library, runs)
    sources = [(one.key, one.manifest.source["run"]) for one in added]
    assert sources == [(("p1", 2), "r2"), (("p1", 3), "r3"), (("p2", 3), "r3")]
    assert passed == []
    library.drop("p1", 2)
    assert add_finished(library, runs) == ([], [])


def test_a_run_without_what_is_asked_for(library: CartridgeStore, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no checkpoint in"):
        add_from_run(library, tmp_path)
    checkpoint(tmp_path / "r", 1)
    with pytest.raises(DataError, match="the run has no cartridge p9; it has p1, p2"):
        add_from_run(library, tmp_path / "r", {"p9": "p9"})


def test_the_manifest_is_plain_json(library: CartridgeStore) -> None:
    entry = add(library)
    plain = json.loads((entry.path.parent / MANIFEST).read_text())
    assert len(plain.pop("manifest_sha256")) == 64
    assert plain["schema"] == 2
    assert plain == entry.manifest.as_dict()


def test_a_file_that_comes_in_is_kept_whatever_the_clock_says(library: CartridgeStore) -> None:
    """An hour's leftovers of a killed process are removed, unless the file is still being written:
    the clock may have been set forward meanwhile."""
    left = library.directory / INCOMING / "left"
    with library.incoming() as file:
        left.mkdir()
        for folder in (left, file.parent):
            os.utime(folder, (0, 0))
        CartridgeStore(library.directory, BASE)
        assert not left.exists()
        save_file({"kv": kv()}, file)
        assert library.add("p1", file, {"by": "test"}).key == ("p1", 1)
    assert not any((library.directory / INCOMING).iterdir())


@given(st.text(max_size=40))
def test_whatever_parses_is_written_back_to_the_same(text: str) -> None:
    try:
        model = parse_model(text)
    except ValueError:
        return
    assert parse_model(str(model)) == model


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("clinic-reader", ModelName("clinic-reader")),
        ("org/model-3B+p@latest", ModelName("org/model-3B", CartridgeName("p"))),
        ("m+patient_01@3:rsa", ModelName("m", CartridgeName("patient_01", 3), "rsa")),
        ("m:self_consistency", ModelName("m", None, "self_consistency")),
    ],
)
def test_examples(text: str, model: ModelName) -> None:
    assert parse_model(text) == model


@pytest.mark.parametrize(
    "text",
    ["", "+p", "m+", "m+p@", "m+p@0", "m+p@03", "m+p@-1", "m+../x", "m:", "m:A", "m+p@1@2", "m\n"],
)
def test_no_names(text: str) -> None:
    with pytest.raises(ValueError, match="is no model name"):
        parse_model(text)


def test_a_cartridge_never_leads_out_of_its_directory() -> None:
    for text in ("../x", "/etc", ".hidden", "a/b", "a\\b", ""):
        with pytest.raises(ValueError, match="is no cartridge"):
            parse_cartridge(text)


@pytest.fixture
def tags_library(tmp_path: Path) -> CartridgeStore:
    return wards(tmp_path)


def test_a_tag_is_a_version_until_it_is_another(tags_library: CartridgeStore) -> None:
    tags_library.tag(CartridgeName("ward", 2), "best")
    tags_library.tag(CartridgeName("ward"), "candidate")
    assert tags_library.tags("ward") == {"best": 2, "candidate": 5}
    assert tags_library.get(parse_cartridge("ward@best")).key == ("ward", 2)
    assert tags_library.get(tags_library.named("ward@best")).key == ("ward", 2)
    tags_library.tag(CartridgeName("ward", tag="candidate"), "best")
    assert tags_library.get(parse_cartridge("ward@best")).key == ("ward", 5)
    assert tags_library.get(parse_cartridge("ward@latest")).key == ("ward", 5)
    tags_library.untag("ward", "candidate")
    assert tags_library.tags("ward") == {"best": 5}
    assert tags_library.versions("ward") == [1, 2, 3, 4, 5]
    assert (
        tags_library.tags("desk") == tags_library.tags("nobody") == tags_library.tags("../x") == {}
    )


def test_a_tag_goes_with_its_version(tags_library: CartridgeStore) -> None:
    tags_library.tag(CartridgeName("ward", 2), "best")
    tags_library.drop("ward", 2)
    assert tags_library.tags("ward") == {}
    with pytest.raises(DataError, match="ward has no tag best; it has none"):
        tags_library.get(parse_cartridge("ward@best"))


def test_names_with_tags_parse_to_themselves() -> None:
    for text in ("reader+ward@best", "reader+ward@v1.2-rc:rsa", "reader+ward@best:best_of_n"):
        assert str(parse_model(text)) == text
    assert parse_cartridge("ward@latest") == CartridgeName("ward")
    assert parse_cartridge("ward@3") == CartridgeName("ward", 3)
    for text in ("ward@", "ward@3x", "ward@-x", "ward@best@3", "ward@a b"):
        with pytest.raises(ValueError, match="is no cartridge"):
            parse_cartridge(text)


def test_the_newest_and_the_tagged_are_kept(tags_library: CartridgeStore) -> None:
    tags_library.tag(CartridgeName("ward", 1), "best")
    assert tags_library.prunable("ward", 2) == [2, 3]
    assert tags_library.prunable("ward", 5) == []
    assert tags_library.prunable("desk", 1) == []
    assert tags_library.prunable("nobody", 1) == []
    with pytest.raises(DataError, match="at least 1 version"):
        tags_library.prunable("ward", 0)


WORDS = {"salt": [{"größe": 2, "a": 1}, {"tide": 3}], "reef": [{}]}


def test_terms_come_back_as_written(tmp_path: Path) -> None:
    file = tmp_path / TERMS
    write_terms(file, WORDS)
    assert read_terms(file) == WORDS
    assert read_terms(tmp_path / "none") == {}
    write_terms(tmp_path / "again", dict(reversed(WORDS.items())))
    assert (tmp_path / "again").read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"schema": 2}', '{"schema": 1, "terms": {}, "sha256": "x"}']
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / TERMS
    file.write_text(content)
    with pytest.raises(DataError, match=r"no readable words .*forge cartridges words"):
        read_terms(file)


def test_a_count_that_was_changed_is_found(tmp_path: Path) -> None:
    file = tmp_path / TERMS
    write_terms(file, WORDS)
    plain = json.loads(file.read_text())
    plain["terms"]["salt"][1]["tide"] = 4
    file.write_text(json.dumps(plain))
    with pytest.raises(DataError, match="its own checksum"):
        read_terms(file)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def no_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()


def copied_from_another(folder: Path) -> None:
    """Put the version p2@1 there, as a copy by hand does."""
    for name in (FILE, MANIFEST):
        shutil.copy(folder.parent.parent / "p2/1" / name, folder / name)


DAMAGE = {
    "another cartridge": copied_from_another,
    "cut manifest": lambda folder: cut(folder / MANIFEST),
    "empty manifest": lambda folder: (folder / MANIFEST).write_bytes(b""),
    "deep manifest": lambda folder: (folder / MANIFEST).write_text("[" * 10**5),
    "no manifest": no_manifest,
    "no text in the manifest": lambda folder: (folder / MANIFEST).write_bytes(b"\xff" * 40),
    "a link to nothing": lambda folder: (no_manifest(folder), (folder / MANIFEST).symlink_to("no")),
    "a link to itself": lambda folder: (
        no_manifest(folder),
        (folder / MANIFEST).symlink_to(MANIFEST),
    ),
    "a folder as file": lambda folder: ((folder / FILE).unlink(), (folder / FILE).mkdir()),
    "a folder as manifest": lambda folder: (no_manifest(folder), (folder / MANIFEST).mkdir()),
    "cut file": lambda folder: cut(folder / FILE),
    "no file": lambda folder: (folder / FILE).unlink(),
}


@pytest.mark.parametrize("harm", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("newest", [True, False], ids=["newest", "first"])
def test_a_damaged_version_is_named_and_dropped(
    library: CartridgeStore, harm: Any, newest: bool
) -> None:
    add(library), add(library), add(library, "p2")
    version = 2 if newest else 1
    harm(library.directory / "p1" / str(version))
    assert [e.key for e in library.entries("p1")] == [("p1", 3 - version)]
    (fault,) = library.damaged("p1").items()
    assert fault[0] == version
    assert f"cartridge p1@{version} is damaged: " in fault[1]
    assert "p2" not in fault[1]
    assert library.every_name() == ["p1", "p2"]
    assert library.damaged("p2") == {}
    assert library.drop("p1", version) == [version]
    assert library.damaged("p1") == {}
    assert library.get(CartridgeName("p1")).key == ("p1", 3 - version)
    assert add(library).key == ("p1", 3)  # a number is never used again


def test_a_cartridge_of_damaged_versions_alone_is_named_and_dropped(
    library: CartridgeStore,
) -> None:
    no_manifest(add(library).path.parent)
    assert library.every_name() == ["p1"]
    assert list(library.damaged("p1")) == [1]
    assert library.drop("p1") == [1]
    assert library.every_name() == []


@pytest.mark.parametrize("content", [b"", b"x", b"1.5", b"\xff\xfe", b"9" * 5000, b"9" * 12])
def test_a_tag_or_a_last_number_of_anything_else_is_none(
    library: CartridgeStore, content: bytes
) -> None:
    entry = add(library)
    library.tag(CartridgeName("p1", 1), "best")
    folder = entry.path.parent.parent
    (folder / "tags" / "best").write_bytes(content)
    (folder / "last").write_bytes(content)
    assert library.tags("p1") == {}
    assert add(library).key == ("p1", 2)
    library.untag("p1", "best")
    assert not (folder / "tags" / "best").exists()
    with pytest.raises(DataError, match="has no tag"):
        library.untag("p1", "../last")


@pytest.mark.parametrize("odd", ["02", "0", "+2", "\u0662", "2.old", "1" * 40])
def test_a_folder_that_is_no_version_counts_as_none(library: CartridgeStore, odd: str) -> None:
    folder = add(library).path.parent
    shutil.copytree(folder, folder.parent / odd)
    assert [e.key for e in library.entries("p1")] == [("p1", 1)]
    assert library.damaged("p1") == {}
    assert add(library).key == ("p1", 2)
    assert library.drop("p1") == [1, 2]


@pytest.mark.parametrize("target", [None, "nowhere"])
def test_a_file_in_the_place_of_a_version_is_passed_over(
    library: CartridgeStore, target: str | None
) -> None:
    folder = add(library).path.parent.parent
    if target is None:
        (folder / "2").write_text("kept by hand")
    else:
        (folder / "2").symlink_to(target)
    assert add(library).key == ("p1", 3)
    assert [e.key for e in library.entries("p1")] == [("p1", 1), ("p1", 3)]


def test_a_tag_of_another_spelling_is_none(library: CartridgeStore) -> None:
    entry = add(library)
    library.tag(CartridgeName("p1", 1), "best")
    for name in ("two words", "9", "x" * 40, ".best"):
        (entry.path.parent.parent / "tags" / name).write_text("1")
    assert library.tags("p1") == {"best": 1}


def test_a_library_that_vanished_is_not_made_again(library: CartridgeStore) -> None:
    assert library.is_readable()
    library.directory.rmdir()
    assert not library.is_readable()
    for look in (library.names, library.every_name, lambda: add(library)):
        with pytest.raises(FileNotFoundError):
            look()
    assert not library.directory.exists()


LIST = """
import sys
from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.library import store
read, parsed = store.read_manifest, []
store.read_manifest = lambda folder: (parsed.append(folder), read(folder))[1]
assert forge() == 0
print(len(parsed), [m for m in ("torch", "transformers") if m in sys.modules])
"""


def test_a_list_parses_each_manifest_once_and_imports_no_torch(tmp_path: Path) -> None:
    library = CartridgeStore(tmp_path / "library", read_base(Path("models/clinic-reader")))
    base = library.base
    zeros = torch.zeros(base.layers, 2, base.kv_heads, 2, base.head_dim)
    for name in ("p1", "p2", "p2"):
        add(library, name, {"kv": zeros})
    library.tag(CartridgeName("p2", 1), "best")
    (library.directory / "p1/1/manifest.json").write_text("{")
    sets = [f"library={library.directory}", "model.path=models/clinic-reader"]
    words = [word for one in sets for word in ("--set", one)]
    done = subprocess.run(
        [sys.executable, "-c", LIST, "cartridges", "list", *words],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    *table, last = done.stdout.splitlines()
    assert last == "3 []"
    assert [line.split()[0] for line in table if line.startswith("  p")] == [
        "p2@1", "p2@2", "p1@1:",
    ]  # fmt: skip
    assert "best" in next(line for line in table if "p2@1" in line)
