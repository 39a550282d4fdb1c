"""Push and pull by the hub's own client, against a hub on loopback."""

from __future__ import annotations

import pytest
import torch
from fake_hub import FakeHub
from format_setup import cartridge
from huggingface_hub import HfApi

from cartridge_forge.plugins.library.formats import forge
from cartridge_forge.plugins.library.hub import pull, push
from cartridge_forge.plugins.library.importing import add_cartridge
from cartridge_forge.plugins.library.store import CartridgeStore

# The client's own upload of a file is of a kind that its HTTP library wants spelled otherwise.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


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
