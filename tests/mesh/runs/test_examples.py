"""The code-fixing example runs from its own mesh file; tests/nightly/runs has the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from example_runs import counts, ran

from protocols.files import iter_rows

pytestmark = pytest.mark.timeout(600)  # a busy machine takes long


def test_code_fixing_runs(tmp_path: Path) -> None:
    run = ran("code_fixing", tmp_path, {})
    assert [row["count"] for row in counts(run)] == [8, 8]
    assert [row["errored"] for row in counts(run)] == [0, 0]
    episodes = list(iter_rows(run.episodes))
    assert {e["task"]["environment"] for e in episodes} == {"code_fixing"}
    assert all(e["reward"] in (0.0, 1.0) for e in episodes)
    said = [t["observation"]["messages"][0]["content"] for e in episodes for t in e["turns"]]
    assert all("f(" in text or text.endswith(".") for text in said)
    assert json.loads(run.results.read_bytes())["status"] == "finished"
