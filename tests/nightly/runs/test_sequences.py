"""Any order of kills, stops, pauses of all processes, control calls, full disks, damage and
resumes: the end is that of the calm run, to the byte, nothing is left behind, and what was paid is
within the cap, once a call.

The files alone are under many more orders in tests/mesh/services/test_run_model.py. Here every
process is real. FORGE_RUN_SEQUENCES is the number of orders; every fifth is of a run that pays a
teacher for hints. Part n draws with the seed n, and xdist plays two parts side by side.

Another number of generators means other batches of decoding, whose sums are rounded otherwise: a
log-probability differs in its seventh digit. So after `scale` the same tokens are asked for, each
once, and not the same bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chaos import shared_memory, wait_until_freed
from forkserver_of_runs import Start, warm_runs
from hypothesis import HealthCheck, Phase, given, seed, settings
from orders import (
    CAP,
    LIMIT_SECONDS,
    PAYING,
    PLAIN,
    STEPS,
    TEACHER,
    Kind,
    Order,
    calm_run,
    play,
)
from small_disk import disk
from small_run import ROOT, latest, rows, same_outcome

from cartridge_forge.plugins.chat.messages import NANO
from cartridge_forge.plugins.replay.budget import UNKNOWN
from cartridge_forge.plugins.replay.clinic_teachers import local_provider
from cartridge_forge.plugins.replay.fake_provider.app import FakeProvider
from cartridge_forge.plugins.replay.spec import LocalSpec, ReplaySpec, ReplayTeacherSpec

SEQUENCES = int(os.environ.get("FORGE_RUN_SEQUENCES", "4"))
PAID = -(-SEQUENCES // 5)
PART = 10  # orders of one test


@pytest.fixture(scope="session")
def start() -> Iterator[Start]:
    models = [ROOT / "models" / name for name in ("clinic-reader", "clinic-clerk")]
    with warm_runs(models) as start:
        yield start


def parts(sequences: int) -> pytest.MarkDecorator:
    """Marks a test to be played in parts: (seed, number of orders)."""
    sizes = [min(PART, sequences - first) for first in range(0, sequences, PART)]
    return pytest.mark.parametrize(("part", "orders"), list(enumerate(sizes)))


def play_all(kind: Kind, part: int, orders: int, check: Callable[[Order], None]) -> None:
    @seed(part)
    @settings(
        max_examples=orders,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(order=kind.orders(part))
    def played(order: Order) -> None:
        before = shared_memory()
        check(order)
        wait_until_freed(before)

    played()


def same_tokens(path: Path, reference: Path) -> None:
    """Every rollout stands once, in order, with its tokens and their versions."""
    fields = ("arm", "step", "id", "response_ids", "versions")
    found, wanted = (
        [{k: row[k] for k in fields} for row in rows(p / "rollouts.jsonl")]
        for p in (path, reference)
    )
    assert found == wanted


@pytest.fixture(scope="session")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calm_run(PLAIN, tmp_path_factory.mktemp("calm"))


@pytest.mark.timeout(PART * 2 * LIMIT_SECONDS)
@parts(SEQUENCES - PAID)
def test_any_order_ends_as_the_calm_run(calm: Path, start: Start, part: int, orders: int) -> None:
    def check(order: Order) -> None:
        with disk() as root:
            told = play(PLAIN, start, root, order)
            scaled = any("scaled" in line for line in told)
            (same_tokens if scaled else same_outcome)(latest(root), calm)

    play_all(PLAIN, part, orders, check)


def provider() -> FakeProvider:
    """A provider in this process, which no kill of a run reaches."""
    spec = ReplaySpec(teachers=(ReplayTeacherSpec(**TEACHER),), quorum=1, cap=CAP)
    return local_provider(spec, LocalSpec(latency_s=0.3))


def at(found: FakeProvider) -> dict[str, Any]:
    return {"replay.teachers": [{**TEACHER, "base_url": found.openai_url}]}


def paid_once_and_within_the_cap(path: Path, found: FakeProvider) -> None:
    """The provider's own count against the ledger: no call but a reserved one, none twice but one
    that a kill left without an answer, and no dollar that the ledger does not know."""
    ledger = rows(path / "teachers.jsonl")
    reserved = {row["attempt"]: row for row in ledger if row["kind"] == "reserved"}
    settled = {row["attempt"]: row for row in reversed(ledger) if row["kind"] == "settled"}
    assert set(settled) == set(reserved)
    spent = sum(row["nanodollars"] for row in settled.values())
    assert found.money() <= spent <= CAP * NANO
    assert {call.attempt for call in found.served} <= set(reserved)
    asked = Counter(reserved[call.attempt]["key"] for call in found.served)
    unknown = Counter(row["key"] for row in settled.values() if row["outcome"] in UNKNOWN)
    assert all(times <= 1 + unknown[key] for key, times in asked.items())


@pytest.fixture(scope="session")
def calm_paid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch, provider() as found:
        patch.setenv(TEACHER["key_env"], "sk-of-no-provider")
        path = calm_run(PAYING, tmp_path_factory.mktemp("calm_paid"), **at(found))
        assert len(found.served) == len({call.prompt for call in found.served}) > STEPS
        paid_once_and_within_the_cap(path, found)
        yield path


@pytest.mark.timeout(PART * 2 * LIMIT_SECONDS)
@parts(PAID)
def test_any_order_of_a_run_that_pays_ends_as_the_calm_one_within_its_cap(
    calm_paid: Path, start: Start, part: int, orders: int
) -> None:
    def check(order: Order) -> None:
        with disk() as root, provider() as found:
            play(PAYING, start, root, order, **at(found))
            path = latest(root)
            for name in ("metrics.jsonl", "episodes.jsonl", "answers.jsonl"):
                assert (path / name).read_bytes() == (calm_paid / name).read_bytes(), name
            paid_once_and_within_the_cap(path, found)

    play_all(PAYING, part, orders, check)
