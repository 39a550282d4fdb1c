"""Test pushes to the hub and pulls from it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub, Repo
from format_setup import ROPE, cartridge, files_of, write
from huggingface_hub import HfApi
from rooms.registry.hub_setup import BASE

from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.formats.cartridge_file import CartridgeFile
from cartridge_forge.plugins.library.hub import pull, push
from cartridge_forge.plugins.library.store import CartridgeStore, add_cartridge
from cartridge_forge.protocols.errors import DataError

# The client's own upload of a file is of a kind that its HTTP library wants spelled otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def held(hub: FakeHub, repo: str, path: Path) -> None:
    """A repository with these files, that somebody else made."""
    hub.repos[repo] = Repo(False)
    hub.repos[repo].commit({file.name: file.read_bytes() for file in files_of(path)})


def test_what_is_pushed_is_pulled(
    hub: FakeHub, api: HfApi, library: CartridgeStore, tmp_path: Path
) -> None:
    made = cartridge(seed=5)
    first = add_cartridge(library, "ward", made, {"by": "test"})
    address = push(first, "me/ward", private=True, api=api)
    oid = hub.repos["me/ward"].commits[0][0]
    assert address == f"{hub.url}/me/ward/commit/{oid}"
    assert hub.repos["me/ward"].private
    assert any(asked.startswith("PUT /lfs/") for asked in hub.asked)  # weights went by LFS
    assert sorted(hub.repos["me/ward"].commits[0][1]) == ["README.md", forge.FILE, forge.MANIFEST]

    elsewhere = CartridgeStore(tmp_path / "elsewhere", BASE)
    entry = pull(elsewhere, "me/ward", "ward", api=api)
    assert entry.key == ("ward", 1)
    assert torch.equal(forge.read(entry.path.parent).kv, made.kv)
    told = entry.manifest.source
    assert (told["hub"], told["revision"], told["by"], told["run"]) == (
        "me/ward",
        oid,
        "test",
        "r1",
    )


def test_a_card_that_is_there_stays(hub: FakeHub, api: HfApi, library: CartridgeStore) -> None:
    entry = add_cartridge(library, "ward", cartridge(seed=5), {})
    hub.repos["me/ward"] = Repo(False)
    hub.repos["me/ward"].commit({"README.md": b"# mine"})
    push(entry, "me/ward", api=api)
    assert hub.repos["me/ward"].commits[0][1]["README.md"] == b"# mine"


@pytest.mark.parametrize("name", ["hazy", "peft", "tokasaurus"])
def test_other_formats_are_pulled(
    hub: FakeHub, api: HfApi, library: CartridgeStore, tmp_path: Path, name: str
) -> None:
    held(hub, "lab/c", write(cartridge(), tmp_path, name))
    if name == "tokasaurus":  # published under other names than its server's
        files = hub.repos["lab/c"].commits[0][1]
        files["cache-step80.pt"] = files.pop("cartridge.pt")
        files["README.md"] = b"# a cartridge"
    entry = pull(library, "lab/c", "c", api=api)
    again = forge.read(entry.path.parent)
    assert torch.equal(again.kv, cartridge().kv)
    assert again.frozen == 1


class Harm:
    def __init__(self, where: Path) -> None:
        self.where = where

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.where}",)


def test_a_malicious_pickle_of_the_hub_is_not_run(
    hub: FakeHub, api: HfApi, library: CartridgeStore, tmp_path: Path
) -> None:
    torch.save({"trainable_keys": Harm(tmp_path / "harmed")}, tmp_path / "c.pt")
    held(hub, "them/c", tmp_path / "c.pt")
    with pytest.raises(DataError, match=r"c.pt is refused: .*system"):
        pull(library, "them/c", "c", api=api)
    assert not (tmp_path / "harmed").exists()
    assert library.names() == []


def test_what_came_damaged_does_not_enter(
    hub: FakeHub, api: HfApi, library: CartridgeStore
) -> None:
    push(add_cartridge(library, "ward", cartridge(), {}), "me/ward", api=api)
    files = hub.repos["me/ward"].commits[0][1]
    whole = files[forge.FILE]
    files[forge.FILE] = whole[:-1] + bytes([whole[-1] ^ 1])
    with pytest.raises(DataError, match="does not match its checksum"):
        pull(library, "me/ward", "pulled", api=api)
    del files[forge.MANIFEST]
    with pytest.raises(DataError, match=r"me/ward holds no cartridge: .* it has cartridge.safe"):
        pull(library, "me/ward", "pulled", api=api)
    assert library.names() == ["ward"]


def test_what_is_for_another_model_does_not_enter(
    hub: FakeHub, api: HfApi, library: CartridgeStore, tmp_path: Path
) -> None:
    held(hub, "lab/c", write(cartridge(3), tmp_path, "peft"))
    with pytest.raises(DataError, match=r"has the shape \[2, 2, 2, P, 4\]: got \[3, 2, 2, 16, 4\]"):
        pull(library, "lab/c", "c", api=api)
    other = CartridgeStore(
        tmp_path / "other", BaseModelInfo(2, 2, 4, 64, "c" * 64, {**ROPE, "factor": 32.0})
    )
    held(hub, "lab/d", write(cartridge(), tmp_path, "hazy"))
    with pytest.raises(DataError, match=r"keys are rotated by factor 8.0"):
        pull(other, "lab/d", "d", api=api)


def test_a_damaged_version_is_not_pushed(hub: FakeHub, api: HfApi, library: CartridgeStore) -> None:
    entry = add_cartridge(library, "ward", cartridge(), {})
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    with pytest.raises(DataError, match="does not match its checksum"):
        push(entry, "me/ward", api=api)
    assert hub.asked == []


def test_a_hub_that_refuses_says_why(hub: FakeHub, api: HfApi, library: CartridgeStore) -> None:
    entry = add_cartridge(library, "ward", CartridgeFile(cartridge().kv), {})
    nobody = HfApi(endpoint=hub.url, token="hf_wrong")
    with pytest.raises(DataError, match=r"the hub refuses me/ward: .*401.*; set HF_TOKEN") as told:
        push(entry, "me/ward", api=nobody)
    assert "hf_wrong" not in str(told.value)
    with pytest.raises(DataError, match=r"the hub refuses me/gone: .*404"):
        pull(library, "me/gone", "gone", api=api)
    with pytest.raises(DataError, match="is no repository of the hub"):
        pull(library, "me/a/b", "b", api=api)
    away = HfApi(endpoint="http://127.0.0.1:9", token=TOKEN)
    with pytest.raises(
        DataError, match=r"the hub at http://127.0.0.1:9 does not do it for me/ward"
    ):
        push(entry, "me/ward", api=away)


def test_a_second_push_is_a_second_commit(
    hub: FakeHub, api: HfApi, library: CartridgeStore
) -> None:
    for seed in (1, 2):
        push(add_cartridge(library, "ward", cartridge(seed=seed), {}), "me/ward", api=api)
    old, new = (commit[0] for commit in hub.repos["me/ward"].commits)
    assert old != new
    entry = pull(library, "me/ward", "old", revision=old, api=api)
    assert torch.equal(forge.read(entry.path.parent).kv, cartridge(seed=1).kv)
    assert entry.manifest.source["revision"] == old
    newest = pull(library, "me/ward", "new", api=api)
    assert newest.manifest.source["revision"] == new
