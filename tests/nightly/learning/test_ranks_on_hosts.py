"""Ranks on two hosts train what one process trains; a checkpoint moves between numbers of them, and
a rank that dies is seen on the other host."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import cannot_make, told_by
from rank_jobs import STEPS

SCENARIO = Path(__file__).parents[2] / "scenarios/rank_hosts_scenario.py"
pytestmark = [pytest.mark.timeout(900)]

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    reason = cannot_make()
    if reason:
        pytest.skip(reason)
    out = tmp_path_factory.mktemp("ranks")
    paths = os.pathsep.join(filter(None, sys.path))
    told_by(SCENARIO, str(out), seconds=850, PYTHONPATH=paths)
    found: Told = {}
    for path in sorted(out.glob("*.[0-9].json")):
        found.setdefault(path.name.split(".")[0], []).append(json.loads(path.read_text()))
    return found


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """A loss to 1e-6, a gradient to 1e-5."""
    assert [r["tokens"] for r in found] == [r["tokens"] for r in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        for channel, term in theirs["terms"].items():
            assert ours["terms"][channel] == pytest.approx(term, rel=1e-4, abs=1e-5), channel


@pytest.mark.parametrize(
    ("job", "ranks"), [("two", 2), ("sharded", 2), ("divided", 2), ("grid", 4)]
)
def test_two_hosts_train_what_one_process_trains(told: Told, job: str, ranks: int) -> None:
    """The batch divided; the base sharded; its layers divided over the hosts; and layers divided
    within each host, with the batch and the shares between them."""
    assert len(told[job]) == ranks
    assert_equal(told[job][0]["results"], told["one"][0]["results"])
    for other in told[job][1:]:
        assert other["bits"] == told[job][0]["bits"]
        assert other["results"] == told[job][0]["results"]


def test_two_hosts_with_cartridges_of_their_own_train_what_one_process_trains(told: Told) -> None:
    ours, others = told["apart"]
    assert_equal(ours["results"], told["one"][0]["results"])
    assert others["results"] == ours["results"]
    assert [ours["names"], others["names"]] == [["a"], ["b"]]


def test_a_run_goes_on_with_other_numbers_of_ranks(told: Told) -> None:
    """Two steps on two hosts, two in one process, two of three ranks on two hosts."""
    assert [len(told[job]) for job in ("half", "more", "rest")] == [2, 1, 3]
    found = [r for job in ("half", "more", "rest") for r in told[job][0]["results"]]
    assert len(found) == STEPS
    assert_equal(found, told["one"][0]["results"])


def test_a_rank_that_dies_is_seen_on_both_hosts(told: Told) -> None:
    """Rank 1, on the first host: rank 0 beside it and rank 2 on the other host."""
    assert len(told["dies"]) == 2
    for rank in told["dies"]:
        assert rank["error"].startswith("RanksLostError: trainer rank ")
        assert rank["version"] == 0  # nothing was trained
