"""A user's function that fails in every way, and rows that change before a run is resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_runs import by_clerk, copied
from small_run import rows, run_to_end

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

FAULTY = """\
import os, sys, time

def faulty(prompt, completion, number):
    print("to nobody")
    if number == 0:
        raise KeyError("gone")
    if number == 1:
        time.sleep(60)
    if number == 2:
        sys.exit(5)
    if number == 3:
        os._exit(9)
    if number == 4:
        return None
    return len(completion)
"""


def test_a_faulty_function_costs_its_episodes_alone_and_rows_may_not_change(
    tmp_path: Path,
) -> None:
    mesh = copied("gsm8k_like", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(FAULTY)
    problems = mesh.parent / "problems.jsonl"
    page = "a page that is longer than the cartridge, for it has some more words than this " * 2
    problems.write_text(
        "".join(
            json.dumps({"question": f"problem {i}", "target": "1", "page": page, "number": i % 8})
            + "\n"
            for i in range(16)
        )
    )
    sets = {
        "reward": [{"python": "mine:faulty", "timeout_s": 1.0, "folder": str(mesh.parent)}],
        "episodes.tasks": 12,
        "episodes.group": 2, "train.steps": 2, "train.checkpoint_every": 1,
    }  # fmt: skip
    process = run_to_end(by_clerk(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    run = (tmp_path / "gsm8k_like" / "latest").resolve()
    whys = {
        0: "mine.py:6: KeyError: 'gone'", 1: "mine.py:8: took longer than 1 s",
        2: "mine.py:10: called sys.exit(5)", 3: "its process ended with 9", 4: "gave None",
    }  # fmt: skip
    met = set()
    for episode in read_rows(run / "episodes.jsonl"):
        number, outcome = (
            episode["task"]["arguments"]["row"]["number"],
            episode["rewards"]["faulty"],
        )
        met.add(number)
        assert outcome["why"] == whys.get(number, "")
        assert outcome["failed"] == (number in (0, 1, 2, 3))
        kind = "reward_left_out" if number == 4 else "reward_failed"
        assert episode["error_kind"] == (kind if number in whys else "")
        assert (episode["reward"] is None) == (number in whys)
    assert met == set(range(8))
    for row in rows(run / "metrics.jsonl"):
        counts = row["episodes"]
        failed = counts["reward/faulty/failed"] + counts["reward/faulty/left_out"]
        assert counts["errored"] == failed > 0

    # The same rows resume; others do not.
    problems.write_text(problems.read_text().replace("problem 7", "problem seven"))
    again = run_to_end(by_clerk(mesh, tmp_path, "--resume", **sets))
    assert again.returncode == 2
    assert "changed since the run began" in again.stdout + again.stderr
