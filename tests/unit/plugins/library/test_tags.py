"""Tags and pruning: a word for a version, versions that may go."""

from __future__ import annotations

from pathlib import Path

import pytest
from format_setup import wards

from cartridge_forge.plugins.library.names import CartridgeName, parse_cartridge, parse_model
from cartridge_forge.plugins.library.store import CartridgeStore
from cartridge_forge.protocols.errors import DataError


@pytest.fixture
def library(tmp_path: Path) -> CartridgeStore:
    return wards(tmp_path)


def test_a_tag_is_a_version_until_it_is_another(library: CartridgeStore) -> None:
    library.tag(CartridgeName("ward", 2), "best")
    library.tag(CartridgeName("ward"), "candidate")
    assert library.tags("ward") == {"best": 2, "candidate": 5}
    assert library.get(parse_cartridge("ward@best")).key == ("ward", 2)
    assert library.get(library.named("ward@best")).key == ("ward", 2)
    library.tag(CartridgeName("ward", tag="candidate"), "best")
    assert library.get(parse_cartridge("ward@best")).key == ("ward", 5)
    assert library.get(parse_cartridge("ward@latest")).key == ("ward", 5)
    library.untag("ward", "candidate")
    assert library.tags("ward") == {"best": 5}
    assert library.versions("ward") == [1, 2, 3, 4, 5]
    assert library.tags("desk") == library.tags("nobody") == library.tags("../x") == {}


def test_a_tag_goes_with_its_version(library: CartridgeStore) -> None:
    library.tag(CartridgeName("ward", 2), "best")
    library.drop("ward", 2)
    assert library.tags("ward") == {}
    with pytest.raises(DataError, match="ward has no tag best; it has none"):
        library.get(parse_cartridge("ward@best"))


def test_names_with_tags_parse_to_themselves() -> None:
    for text in ("reader+ward@best", "reader+ward@v1.2-rc:rsa", "reader+ward@best:best_of_n"):
        assert str(parse_model(text)) == text
    assert parse_cartridge("ward@latest") == CartridgeName("ward")
    assert parse_cartridge("ward@3") == CartridgeName("ward", 3)
    for text in ("ward@", "ward@3x", "ward@-x", "ward@best@3", "ward@a b"):
        with pytest.raises(ValueError, match="is no cartridge"):
            parse_cartridge(text)


def test_the_newest_and_the_tagged_are_kept(library: CartridgeStore) -> None:
    library.tag(CartridgeName("ward", 1), "best")
    assert library.prunable("ward", 2) == [2, 3]
    assert library.prunable("ward", 5) == []
    assert library.prunable("desk", 1) == []
    assert library.prunable("nobody", 1) == []
    with pytest.raises(DataError, match="at least 1 version"):
        library.prunable("ward", 0)
