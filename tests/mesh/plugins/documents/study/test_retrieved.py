"""Passages beside cartridges in a whole run, sampled by either engine."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from small_run import command, latest, run_to_end

ARMS = ["none", "document", "retrieved", "on_policy", "retrieved_cartridge"]
REQUIRED = os.environ.get("FORGE_REQUIRE_VLLM") == "1"


@pytest.mark.parametrize(
    "backend",
    [
        "torch",
        pytest.param(
            "vllm",
            marks=pytest.mark.skipif(
                find_spec("vllm") is None and not REQUIRED, reason="make install-vllm"
            ),
        ),
    ],
)
def test_passages_are_arms_of_a_run(tmp_path: Path, backend: str) -> None:
    sets = {
        "train__steps": 2, "train__warmup_steps": 1, "train__checkpoint_every": 0,
        "train__warm_start": None, "evaluate__arms": ARMS, "evaluate__probe_every": 0,
        "evaluate__questions": 12, "generator__backend": backend,
    }  # fmt: skip
    done = run_to_end(command(tmp_path, **sets))
    assert done.returncode == 0, done.stderr
    results = json.loads((latest(tmp_path) / "results.json").read_text())
    assert set(results["arms"]) == set(ARMS)
    lines = (latest(tmp_path) / "answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    greedy = {
        arm: {r["id"]: r for r in rows if r["arm"] == arm and not r["sampled"]} for arm in ARMS
    }
    assert all(of_arm.keys() == greedy["none"].keys() for of_arm in greedy.values())
    steps = {arm: {row["step"] for row in of_arm.values()} for arm, of_arm in greedy.items()}
    assert steps["retrieved_cartridge"] == steps["on_policy"] == {2}
    assert steps["retrieved"] == steps["none"] == {0}
    nll = {arm: sum(row["nll"] for row in of_arm.values()) for arm, of_arm in greedy.items()}
    assert nll["retrieved"] < nll["none"] / 2  # the charts' questions have the words of their facts
    assert nll["retrieved_cartridge"] != nll["on_policy"]
