"""Push and pull by the hub's own client, against a hub on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fake_hub import TOKEN, FakeHub, fake_hub
from format_setup import ROPE, cartridge
from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from registry.formats import forge
from registry.formats.base_model import BaseModelInfo
from registry.hub import pull, push
from registry.importing import add_cartridge
from registry.store import CartridgeStore

# The client's own upload of a file is of a kind that its HTTP library wants spelled otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

BASE = BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE, "models/some")


@pytest.fixture(scope="module")
def house() -> Iterator[FakeHub]:
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def hub(house: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    disable_progress_bars()
    house.repos.clear()
    house.blobs.clear()
    house.asked.clear()
    return house


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    return CartridgeStore(tmp_path / "library", BASE)


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
