"""Published versions: the newest few are held, and a number never means two things."""

from __future__ import annotations

import pytest
import torch

from learning.cartridge.bank import CartridgeVersions, VersionLedger
from protocols.errors import PublishError

NAMES = ("a", "b")


def kv(version: int) -> torch.Tensor:
    """[2, 1, 2, 1, 1, 1]: 10 v for "a", 10 v + 1 for "b"."""
    first = torch.tensor([10.0 * version, 10.0 * version + 1])
    return first.view(2, 1, 1, 1, 1, 1).expand(2, 1, 2, 1, 1, 1)


def held(*versions: int, keep: int = 2) -> CartridgeVersions:
    store = CartridgeVersions(keep)
    for version in versions:
        store.add(version, NAMES, kv(version))
    return store


def test_a_version_is_read_by_name() -> None:
    store = held(0, 3)
    assert store.get("a", 0).flatten().tolist() == [0, 0]
    assert store.get("b", 0).flatten().tolist() == [1, 1]
    assert store.get("b", 3).flatten().tolist() == [31, 31]
    assert store.get("b", 3).shape == (1, 2, 1, 1, 1)


def test_the_newest_are_kept_and_the_oldest_evicted() -> None:
    store = held(*range(1000), keep=3)
    assert sorted(store._kv) == [997, 998, 999]
    with pytest.raises(
        PublishError,
        match=r"cartridge a version 996 is not held here \(held: \[997, 998, 999\]\): it was never "
        "loaded by this generator, or was evicted",
    ):
        store.get("a", 996)


def test_a_version_not_loaded_yet_is_not_replaced_by_another() -> None:
    with pytest.raises(PublishError, match=r"cartridge b version 5 is not held here \(held: \[4\]"):
        held(4).get("b", 5)


@pytest.mark.parametrize("again", [4, 3, 0])
def test_a_number_is_never_reused_and_never_goes_back(again: int) -> None:
    store = held(3, 4)
    with pytest.raises(
        PublishError, match=f"version {again} was offered after version 4: .* publish a new one"
    ):
        store.add(again, NAMES, kv(9))
    assert store.get("a", 4).flatten().tolist() == [40, 40]


def test_a_number_stays_taken_after_its_eviction() -> None:
    store = held(1, 2, 3, keep=1)
    with pytest.raises(PublishError, match="version 1 was offered after version 3"):
        store.add(1, NAMES, kv(1))


def test_an_unknown_cartridge_of_a_held_version() -> None:
    with pytest.raises(PublishError, match=r"version 4 has no cartridge 'z'; it has \('a', 'b'\)"):
        held(4).get("z", 4)


def test_an_evicted_version_is_let_go_of_when_its_last_request_ends() -> None:
    ledger = VersionLedger(keep=1)
    assert ledger.add(0, NAMES) == []
    ledger.begin(0)
    ledger.begin(0)
    assert ledger.add(1, NAMES) == [], "two requests still read version 0"
    with pytest.raises(PublishError, match="version 0 is not held here"):
        ledger.index("a", 0)
    assert ledger.end(0) == []
    assert ledger.end(0) == [0]
    ledger.begin(1)
    assert ledger.end(1) == [], "nobody reads version 1, but it may still be asked for"
    assert ledger.add(2, NAMES) == [1]


def test_a_name_has_its_place_in_its_version() -> None:
    ledger = VersionLedger(keep=2)
    ledger.add(4, ("a", "b"))
    ledger.add(5, ("b", "a"))
    assert (ledger.index("b", 4), ledger.index("b", 5)) == (1, 0)
