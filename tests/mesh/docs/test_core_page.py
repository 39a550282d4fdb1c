"""Test the page of the core, and the two loops to change."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tutorial_pages import CORE, ROOT, as_a_reader, follow


@pytest.mark.timeout(1200)
def test_every_block_of_the_core_page_runs_in_order(tmp_path: Path) -> None:
    commands = follow(CORE, tmp_path, short=False, timeout_s=600, installs=True)
    for words in ("forge-run longhealth", "python one_process.py", "pip install", "grade.py"):
        assert any(words in command for command in commands)


def printed(example: str, steps: int, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / example), str(steps)],
        cwd=folder, env=as_a_reader(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_one_process_trains_and_the_answer_becomes_the_charts(tmp_path: Path) -> None:
    lines = printed("one_process.py", 20, tmp_path).splitlines()
    kl = [float(line.rpartition(" ")[2]) for line in lines if line.startswith("step ")]
    assert len(kl) == 20
    assert sum(kl[-5:]) < 0.5 * sum(kl[:5])
    first, last = (line for line in lines if line.startswith("version "))
    assert first.startswith("version 0: what is the insulin?")
    assert "86 units" not in first
    assert last.startswith("version 20: what is the insulin?")
    assert "86 units" in last  # as the chart says


def test_the_generators_of_a_mesh_loop_answer_over_each_version(tmp_path: Path) -> None:
    text = printed("mesh_loop.py", 2, tmp_path)
    assert re.findall(r"version \[(.*)\]: \d+% right", text) == ["0", "1", "2"]
    tokens = re.findall(r"step \d: (\d+) tokens, KL \d", text)
    assert len(tokens) == 2
    assert min(map(int, tokens)) > 56  # more than one token of each of a step's 56 responses
