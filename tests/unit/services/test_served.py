"""What was served is compared with what was published, by its numbers' fingerprints."""

import pytest

from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.step import (
    CartridgeSnapshot,
    Completion,
    GenerateRequest,
    PrefixRef,
    PublishedCartridge,
    Sampling,
    TensorLayout,
    TensorRef,
    composed_ref,
)
from cartridge_forge.services.clients import PublishedCartridges

PACKET = TensorRef("k", TensorLayout(()))


def cartridges(since: int, **fingerprints: str) -> tuple[PublishedCartridge, ...]:
    return tuple(PublishedCartridge(n, since, PACKET, f) for n, f in fingerprints.items())


def published(keep: int = 3, versions: int = 3) -> PublishedCartridges:
    """Fingerprints are a0 b0, a1 b1, ..."""
    found = PublishedCartridges(keep)
    for v in range(versions):
        found.add(CartridgeSnapshot(v, cartridges(v, a=f"a{v}", b=f"b{v}")))
    return found


def check(ledger: PublishedCartridges, ref: PrefixRef, served: tuple[str, ...]) -> None:
    asked = GenerateRequest("train/7/0", (4,), ref, Sampling(), 0)
    answer = Completion("train/7/0", (5,), (-0.1,), (ref.version,), "stop", served=served)
    ledger.check("generator[1]", [asked], [answer])


A2, B2 = PrefixRef("cartridge/a", 2), PrefixRef("cartridge/b", 2)


def test_the_published_numbers_pass() -> None:
    check(published(), A2, ("a2",))
    check(published(), composed_ref([B2, A2]), ("b2", "a2"))
    check(published(), PrefixRef("document/a", 0), ("",))
    published().check_served("hinted_teacher[0]", "scores/1", 2, {"a": "a2"})


@pytest.mark.parametrize(
    ("ref", "served", "whose"),
    [
        (A2, ("a0",), "which is cartridge a version 0"),
        (A2, ("b2",), "which is cartridge b version 2"),
        (A2, ("zz",), r"which no published cartridge has \(versions \[0, 1, 2\]\)"),
        (A2, (), r"fingerprint \(none given\)"),
        (composed_ref([B2, A2]), ("b2", "a1"), "cartridge a version 2, .* a version 1"),
    ],
)
def test_other_numbers_are_refused_by_name(
    ref: PrefixRef, served: tuple[str, ...], whose: str
) -> None:
    with pytest.raises(StaleTokenError, match=whose) as caught:
        check(published(), ref, served)
    assert "generator[1] served train/7/0 under cartridge a version 2" in str(caught.value)
    assert "fingerprint a2" in str(caught.value)


def test_a_teachers_scores_are_compared_too() -> None:
    with pytest.raises(StaleTokenError, match=r"hinted_teacher\[0\] served scores/1"):
        published().check_served("hinted_teacher[0]", "scores/1", 2, {"a": "a2", "b": "b1"})


def test_only_the_newest_versions_are_kept() -> None:
    ledger = published(keep=2)
    check(ledger, PrefixRef("cartridge/a", 0), ("gone",))  # not compared: a generator refuses it
    with pytest.raises(StaleTokenError):
        check(ledger, PrefixRef("cartridge/a", 1), ("gone",))


def test_evidence_that_a_backend_declares_must_come() -> None:
    asked = GenerateRequest("train/7/0", (4,), A2, Sampling(), 0)
    bare = Completion("train/7/0", (5,), (), (2,), "stop")
    for evidence, message in [
        ({"logprobs"}, "1 tokens of train/7/0 with 0 log-probabilities"),
        ({"fingerprint"}, r"fingerprint \(none given\)"),
    ]:
        ledger = PublishedCartridges(3, frozenset(evidence))
        ledger.add(CartridgeSnapshot(2, cartridges(2, a="a2")))
        with pytest.raises(StaleTokenError, match=message):
            ledger.check("generator[1]", [asked], [bare])
    neither = PublishedCartridges(3, frozenset())
    neither.add(CartridgeSnapshot(2, cartridges(2, a="a2")))
    neither.check("generator[1]", [asked], [bare])  # the canary checks such a backend


def test_hints_are_read_by_what_was_published_for_them() -> None:
    ledger = PublishedCartridges(2)
    ledger.add(CartridgeSnapshot(0, cartridges(0, a="a0"), cartridges(0, a="mean0")))
    ledger.add(CartridgeSnapshot(1, cartridges(1, a="a1"), cartridges(1, a="mean1")))
    ledger.check_served("sdpo_teacher[0]", "scores/1", 1, {"a": "mean1"})
    for other in ("a1", "mean0"):
        with pytest.raises(StaleTokenError, match=r"sdpo_teacher\[0\] served scores/1"):
            ledger.check_served("sdpo_teacher[0]", "scores/1", 1, {"a": other})
    check(ledger, PrefixRef("cartridge/a", 1), ("a1",))
