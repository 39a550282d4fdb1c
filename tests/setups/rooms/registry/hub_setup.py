"""A library and a hub that stands in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_hub import TOKEN, FakeHub, fake_hub
from format_setup import ROPE, cartridge, same
from huggingface_hub import HfApi
from huggingface_hub.utils import disable_progress_bars

from cartridge_forge.plugins.library.formats.base_model import BaseModelInfo
from cartridge_forge.plugins.library.formats.cartridge_file import Provenance
from cartridge_forge.plugins.library.formats.convert import read
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.errors import DataError

BASE = BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE, "models/some")


@pytest.fixture(scope="module")
def house() -> Iterator[FakeHub]:
    """Yield the hub of all tests of a file."""
    with fake_hub() as hub:
        yield hub


@pytest.fixture
def hub(house: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    """Empty the hub and return it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    disable_progress_bars()
    house.repos.clear()
    house.blobs.clear()
    house.asked.clear()
    return house


@pytest.fixture
def api(hub: FakeHub) -> HfApi:
    """Return a client of the hub."""
    return HfApi(endpoint=hub.url, token=TOKEN)


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    """Return a library of its own."""
    return CartridgeStore(tmp_path / "library", BASE)


SMALL = cartridge(1, 1, 16, 2, dtype="bfloat16")
TEXTS = (".json", ".yaml")


def outcome(path: Path) -> str:
    """`refused`, `same`, or `bare`: whole numbers without what is known of them, as where the very
    word is damaged under which PEFT's file has our label."""
    try:
        again = read(path)
    except DataError:
        return "refused"
    bare = again.facts in (Provenance(), Provenance(base=SMALL.facts.base))
    assert same(replace(again, facts=SMALL.facts) if bare else again, SMALL)
    return "bare" if bare else "same"
