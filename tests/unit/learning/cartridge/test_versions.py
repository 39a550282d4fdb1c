"""Published versions: the newest few are held, and a number never means two things."""

from __future__ import annotations

import pytest
import torch

from cartridge_forge.learning.cartridge import CartridgeVersions, VersionLedger
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.step import PrefixRef, composed_ref

NAMES = ("a", "b")


def kv(version: int) -> dict[str, torch.Tensor]:
    """[1, 2, 1, 1, 1] each: 10 v for "a", 10 v + 1 for "b"."""
    return {n: torch.full((1, 2, 1, 1, 1), 10.0 * version + i) for i, n in enumerate(NAMES)}


def all_since(version: int) -> dict[str, int]:
    return dict.fromkeys(NAMES, version)


def held(*versions: int, keep: int = 2) -> CartridgeVersions:
    store = CartridgeVersions(keep)
    for version in versions:
        store.add(version, all_since(version), kv(version))
    return store


def test_a_version_is_read_by_name() -> None:
    store = held(0, 3)
    assert store.get("a", 0).flatten().tolist() == [0, 0]
    assert store.get("b", 0).flatten().tolist() == [1, 1]
    assert store.get("b", 3).flatten().tolist() == [31, 31]
    assert store.get("b", 3).shape == (1, 2, 1, 1, 1)


def test_the_newest_are_kept_and_the_oldest_evicted() -> None:
    store = held(*range(1000), keep=3)
    assert {version for _, version in store._kv} == {997, 998, 999}
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
        store.add(again, all_since(again), kv(9))
    assert store.get("a", 4).flatten().tolist() == [40, 40]


def test_a_number_stays_taken_after_its_eviction() -> None:
    store = held(1, 2, 3, keep=1)
    with pytest.raises(PublishError, match="version 1 was offered after version 3"):
        store.add(1, all_since(1), kv(1))


def test_an_unknown_cartridge_of_a_held_version() -> None:
    with pytest.raises(PublishError, match=r"version 4 has no cartridge 'z'; it has \('a', 'b'\)"):
        held(4).get("z", 4)


A0, A1, B0 = PrefixRef("cartridge/a", 0), PrefixRef("cartridge/a", 1), PrefixRef("cartridge/b", 0)


def test_an_evicted_version_is_let_go_of_when_its_last_request_ends() -> None:
    ledger = VersionLedger(keep=1)
    assert ledger.add(0, {"a": 0}, {"a"}) == []
    ledger.begin(A0)
    ledger.begin(A0)
    assert ledger.add(1, {"a": 1}, {"a"}) == [], "two requests still read version 0"
    with pytest.raises(PublishError, match="version 0 is not held here"):
        ledger.since("a", 0)
    assert ledger.end(A0) == []
    assert ledger.end(A0) == [("a", 0)]
    ledger.begin(A1)
    assert ledger.end(A1) == [], "nobody reads version 1, but it may still be asked for"
    assert ledger.add(2, {"a": 2}, {"a"}) == [("a", 1)]


def test_what_did_not_change_is_held_once_and_stays() -> None:
    """b's numbers are those of version 0 until version 3; each version has its own a."""
    store = CartridgeVersions(keep=2)
    store.add(0, {"a": 0, "b": 0}, kv(0))
    for version in (1, 2):
        since = {"a": version, "b": 0}
        assert store.missing(since) == {"a"}
        store.add(version, since, {"a": kv(version)["a"]})
    assert sorted(store._kv) == [("a", 1), ("a", 2), ("b", 0)]
    assert store.get("b", 2) is store.get("b", 1)
    assert store.get("b", 2).flatten().tolist() == [1, 1]
    assert store.get("a", 2).flatten().tolist() == [20, 20]
    store.add(3, {"a": 2, "b": 3}, {"b": kv(3)["b"]})
    assert sorted(store._kv) == [("a", 2), ("b", 0), ("b", 3)], "version 2 still has b since 0"
    assert store.get("a", 3) is store.get("a", 2)
    store.add(4, {"a": 2, "b": 3}, {})
    assert sorted(store._kv) == [("a", 2), ("b", 3)]


def test_a_late_reader_misses_all_that_its_first_version_has() -> None:
    store = CartridgeVersions(keep=2)
    since = {"a": 6, "b": 2}
    assert store.missing(since) == {"a", "b"}
    with pytest.raises(PublishError, match=r"version 7 .* not held here \(b since 2\); publish it"):
        store.add(7, since, {"a": kv(6)["a"]})
    store.add(7, since, {"a": kv(6)["a"], "b": kv(2)["b"]})
    assert (store.get("a", 7)[0, 0].item(), store.get("b", 7)[0, 0].item()) == (60, 21)


def test_held_numbers_are_not_replaced() -> None:
    store = held(3)
    with pytest.raises(PublishError, match=r"not held here \(a since 3\)"):
        store.add(4, {"a": 3, "b": 4}, kv(9))
    assert store.get("a", 3).flatten().tolist() == [30, 30]


def test_a_request_holds_what_it_reads_and_no_more() -> None:
    ledger = VersionLedger(keep=1)
    ledger.add(0, {"a": 0, "b": 0}, {"a", "b"})
    both = composed_ref([A0, PrefixRef("document/d", 5), B0])
    assert ledger.resolved(both) == both
    ledger.begin(A0)
    ledger.begin(both)
    assert ledger.add(1, {"a": 1, "b": 1}, {"a", "b"}) == []
    assert ledger.end(both) == [("b", 0)]
    assert ledger.end(A0) == [("a", 0)]


def test_a_prefix_is_resolved_to_when_its_parts_changed() -> None:
    ledger = VersionLedger(keep=3)
    ledger.add(6, {"a": 6, "b": 2}, {"a", "b"})
    ledger.add(7, {"a": 6, "b": 7}, {"b"})
    asked = composed_ref(
        [PrefixRef("cartridge/b", 6), PrefixRef("cartridge/a", 7), PrefixRef("document/a", 7)]
    )
    assert ledger.resolved(asked) == composed_ref(
        [PrefixRef("cartridge/b", 2), PrefixRef("cartridge/a", 6), PrefixRef("document/a", 7)]
    )
    assert ledger.drop(6) == [("b", 2)]
    with pytest.raises(PublishError, match="cartridge b version 6 is not held here"):
        ledger.resolved(asked)
