"""Test what generators served, roles by name, and facts of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from chaos import ROLES

from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.protocols.errors import StaleTokenError
from cartridge_forge.protocols.spec.mesh import ROLES as SIZED
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
from cartridge_forge.services.proc_info import CpuSeconds, cpu_seconds
from cartridge_forge.services.roles import ALONE, last_state_here

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


BURN = "import time\nwhile time.process_time() < 0.3: pass\n"


def test_a_childs_seconds_count_while_it_runs_and_once_it_is_waited_for() -> None:
    me = os.getpid()
    before = cpu_seconds(me, (me,))
    script = BURN + "print('burnt', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        living = cpu_seconds(me, (me, child.pid)).since(before)
        assert living.chosen >= 0.25, "it was chosen"
        assert living.all >= living.chosen - 1e-6
        child.communicate("\n")
    dead = cpu_seconds(me, (me,)).since(before)
    assert dead.all - dead.chosen >= 0.25, "of all, not of those chosen"


def test_the_share_is_of_all_seconds() -> None:
    assert CpuSeconds(3.0, 14.0).since(CpuSeconds(1.0, 4.0)).share == pytest.approx(0.2)
    assert CpuSeconds(0.0, 0.0).share == 0.0


MESH = str(Path(__file__).parents[3] / "meshes/longhealth.yaml")


def test_every_role_is_in_the_table_of_the_chaos_suite() -> None:
    struck = {role.name for role in ROLES}
    assert struck == {*SIZED, *ALONE, "controller"}


def test_a_trainer_elsewhere_keeps_its_last_state_in_the_store() -> None:
    hosts = "hosts={kind: addresses, addresses: [tcp://10.0.0.2:26600]}"
    store = "records.store=s3://bucket/runs"
    for sets, here in (([], True), ([hosts], True), ([store], True), ([hosts, store], False)):
        assert last_state_here(load_spec(MESH, sets=sets).spec) == here


def test_the_number_of_descriptors_is_raised_or_refused() -> None:
    code = (
        "import resource, sys; "
        "from cartridge_forge.forge_run.preflight import require_descriptors; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (48, int(sys.argv[1]))); "
        "require_descriptors(); print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )

    def tried(hard: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, str(hard)], capture_output=True, text=True, check=False
        )

    assert tried(200).stdout == "200\n"
    refused = tried(48)
    assert refused.returncode != 0
    assert "this process may open 48 files and connections at a time, and needs 128; raise" in (
        refused.stderr
    )
