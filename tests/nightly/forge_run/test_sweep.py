"""forge sweep: two small runs side by side, and nothing to do the second time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from small_run import ROOT, run_to_end

from cartridge_forge.protocols.files import read_rows

pytestmark = [pytest.mark.timeout(600)]

SWEEP: dict[str, Any] = {
    "name": "tiny",
    "mesh": str(ROOT / "meshes" / "longhealth.yaml"),
    "seeds": 1,
    "set": {
        "train.steps": 2,
        "train.warmup_steps": 1,
        "rollout.prompts": 2,
        "data.patients": 1,
        "evaluate.questions": 4,
        "roles.generator.replicas": 1,
        "spares": 0,
        "plane": "shared_memory",
    },
    "axes": {"cartridge.tokens": [28, 12]},
    "variants": [{"arms": {"untrained": "first tokens", "on_policy": "on policy"}}],
}


def test_two_runs_side_by_side(tmp_path: Path) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text(json.dumps(SWEEP))
    code = "import sys; from cartridge_forge.forge_run.cli import forge; sys.exit(forge())"
    command = [sys.executable, "-c", code, "sweep", str(file), "--run-dir", str(tmp_path)]
    first = run_to_end([*command, "--jobs", "2"], timeout=400)
    assert first.returncode == 0, first.stdout + first.stderr
    began = [i for i, x in enumerate(first.stdout.splitlines()) if ": runs, see" in x]
    ended = [i for i, x in enumerate(first.stdout.splitlines()) if ": finished in" in x]
    assert max(began) < min(ended), "the second began before the first ended"
    told = json.loads((tmp_path / "sweep-tiny" / "sweep.json").read_text())
    assert [(row["point"], row["arm"]) for row in told["rows"]] == [
        ({"cartridge.tokens": p}, arm) for p in (28, 12) for arm in ("first tokens", "on policy")
    ]
    assert len(told["runs"]) == 2
    for name, run in told["runs"].items():
        tokens = int(name.partition("=")[2].split()[0])
        directory = tmp_path / "longhealth" / run
        results = json.loads((directory / "results.json").read_text())
        assert results["compression"]["cartridge_tokens"] == tokens
        assert len(read_rows(directory / "metrics.jsonl")) == 2

    second = run_to_end(command, timeout=120)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("finished before") == 2
    table = first.stdout.partition("\nsweep tiny")[2]
    assert second.stdout.partition("\nsweep tiny")[2] == table != ""
