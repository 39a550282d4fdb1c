"""Tags and pruning: a word for a version, versions that may go."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_setup import ROPE, cartridge

from protocols.errors import DataError
from registry.formats.base_model import BaseModelInfo
from registry.importing import add_cartridge
from registry.names import CartridgeName
from registry.store import CartridgeStore

BASE = BaseModelInfo(2, 2, 4, 64, "c" * 64, ROPE)


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    """Five versions of `ward`, one of `desk`."""
    made = CartridgeStore(tmp_path, BASE)
    for name, seed in (*(("ward", seed) for seed in range(5)), ("desk", 9)):
        add_cartridge(made, name, cartridge(seed=seed), {})
    return made


@pytest.mark.parametrize("tag", ["latest", "7", "", "a/b", "../x", "é", "t" * 33, ".x"])
def test_what_is_no_tag_is_refused(library: CartridgeStore, tag: str) -> None:
    with pytest.raises(DataError, match="is no tag"):
        library.tag(CartridgeName("ward"), tag)
