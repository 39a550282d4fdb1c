"""`forge runs`, and `forge status` of a run that has ended."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from cartridge_forge.forge_run.cli import forge
from cartridge_forge.plugins.spec_files.loading import load_spec
from cartridge_forge.plugins.spec_files.yaml_source import dump_yaml
from cartridge_forge.plugins.watch.commands.runs import RunSummary, summary_of
from cartridge_forge.plugins.watch.control.endpoints import Endpoints, write_endpoints
from cartridge_forge.protocols.records.run_files import MetricRow
from cartridge_forge.services.run_directory import RunDirectory

REPOSITORY = Path(__file__).parents[5]
Printed = pytest.CaptureFixture[str]
MEASURED = {"accuracy": 0.875, "ci95": [0.75, 0.95], "n": 40, "parse_failures": 0, "sampled": None}
RESULTS: dict[str, Any] = {
    "arms": {"on_policy": MEASURED}, "kl": {"first": 2.0, "last": 0.5}, "status": "finished",
    "wall_seconds": 95.4, "compression": {"ratio": 8.0}, "orchestration_share": 0.1,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def new_run(home: Path, minute: int, mesh: str = "tiny") -> RunDirectory:
    spec = load_spec(str(REPOSITORY / "meshes/longhealth.yaml")).spec
    began = datetime(2026, 7, 26, 10, minute, tzinfo=UTC)
    run = RunDirectory.create(home / "runs", mesh, dump_yaml(spec.as_dict()), began)
    run.append_event("run_started")
    return run


def step(run: RunDirectory, number: int, kl: float, arm: str = "on_policy") -> None:
    run.append_metric(
        MetricRow(arm=arm, step=number, version=number, kl=kl, grad_norm=1.0, lr=0.1, tokens=9,
                  stale_tokens=0)
    )  # fmt: skip


def test_states_and_results_of_runs(home: Path) -> None:
    killed, stopped, finished, torn, damaged = (new_run(home, minute) for minute in range(5))
    step(killed, 1, 2.0)
    step(killed, 2, 1.5)
    stopped.append_event("stopping")
    step(finished, 7, 0.5)
    step(finished, 9, 0.25, arm="offline")  # another arm's: not told
    finished.results.write_text(json.dumps(RESULTS))
    torn.results.write_text("{")  # by a power cut: the resumed run writes it anew
    damaged.metrics.write_text('{"arm": \n{"arm": "on_policy"}\n')
    assert summary_of(killed.path) == RunSummary(
        "tiny", killed.id, str(killed.path), "unfinished", step=2, kl=1.5
    )
    assert summary_of(stopped.path).state == "stopped"
    assert summary_of(finished.path) == RunSummary(
        "tiny", finished.id, str(finished.path), "finished", step=7, kl=0.5, accuracy=0.875,
        ci95=(0.75, 0.95), seconds=95.4,
    )  # fmt: skip
    assert summary_of(torn.path).state == "unfinished"
    assert summary_of(damaged.path).state == "damaged"


def test_a_table_of_runs_the_last_started_first(home: Path, capsys: Printed) -> None:
    first, last = new_run(home, 1), new_run(home, 2, mesh="other")
    first.results.write_text(json.dumps(RESULTS))
    step(first, 7, 0.5)
    assert forge(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 runs"
    assert lines[2].split() == [
        f"other/{last.id}", "unfinished", "-", "-", "-", "-", "-", f"runs/other/{last.id}",
    ]  # fmt: skip
    assert lines[3].split() == [
        f"tiny/{first.id}", "finished", "7", "0.500", "87.5%", "75.0-95.0%", "1m35s",
        f"runs/tiny/{first.id}",
    ]  # fmt: skip
    assert forge(["runs", "--json"]) == 0
    assert [run["state"] for run in json.loads(capsys.readouterr().out)] == [
        "unfinished",
        "finished",
    ]


def test_a_run_that_runs_is_told_so(home: Path) -> None:
    run = new_run(home, 1)
    write_endpoints(run.path, Endpoints("127.0.0.1:1", None, os.getpid()))
    assert summary_of(run.path).state == "running"


def test_no_runs_say_how_to_make_one(home: Path, capsys: Printed) -> None:
    assert forge(["runs"]) == 0
    assert capsys.readouterr().err == "no runs under runs; forge-run longhealth makes one\n"


def test_the_status_of_a_run_that_has_ended_is_its_result(home: Path, capsys: Printed) -> None:
    run = new_run(home, 1)
    run.results.write_text(json.dumps(RESULTS))
    assert forge(["status", run.id]) == 0
    out = capsys.readouterr().out
    assert f"run     {run.id}" in out
    assert "finished in 1m35s, KL 2.000 to 0.500, 8.0x fewer KV tokens" in out
    assert "87.5%" in out
    assert forge(["status", run.id, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["stage"], told["done"]) == (run.id, "finished", True)
    assert told["results"]["arms"]["on_policy"]["accuracy"] == 0.875
