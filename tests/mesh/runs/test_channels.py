"""Test whole runs with more channels: rewards, RSA, all three."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from channel_runs import GROUP, STEPS, TASKS, whole_run
from example_runs import by_clerk, copied
from rooms.training.rsa_runs import CANDIDATES
from small_run import ROOT, Finished, run_to_end

from cartridge_forge.plugins.chat.messages import NANO, PanelVerdict
from cartridge_forge.plugins.environments.episode_files import from_row
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.replay.vote_records import from_row as record_from
from cartridge_forge.protocols.files import read_rows

CHANNELS = tuple(EpisodesObjective().weights)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return whole_run(tmp_path_factory.mktemp("three_channels"))


def test_every_channel_has_its_own_value_denominator_norm_and_angles(done: Finished) -> None:
    rows = read_rows(done.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        assert list(row["channels"]) == list(CHANNELS)
        weights = [row["channels"][name]["weight"] for name in CHANNELS]
        assert weights == [1.0, 1.0, 0.5, 0.5]
        assert row["episodes"]["count"] == TASKS * GROUP
    assert rows[0]["channels"]["replay_dpo"] == {
        "value": 0.0, "count": 0, "weight": 0.5, "coefficient": 0.5,
    }  # fmt: skip
    # By the last step every channel had data, and the teachers' pairs had come.
    full = next(row for row in rows if all(row["channels"][name]["count"] for name in CHANNELS))
    for name in CHANNELS:
        assert full["channels"][name]["grad_norm"] >= 0.0, name
    assert {"doc_kl/sdpo", "doc_kl/replay_dpo", "sdpo/replay_dpo"} <= set(full["cosines"])
    assert all(-1.0 <= cosine <= 1.0 for cosine in full["cosines"].values())


def test_traces_read_back_as_what_was_sampled(done: Finished) -> None:
    rows = read_rows(done.path / "episodes.jsonl")
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, 5), TASKS * GROUP)
    for row in rows:
        episode = from_row(row)
        versions = {v for turn in episode.turns for v in turn.versions}
        assert versions == {row["step"] - 1}  # strictly on policy
        for before, after in zip(episode.turns, episode.turns[1:], strict=False):
            stood = (*before.context_ids, *before.response_ids)
            assert after.context_ids[: len(stood)] == stood


def test_every_vote_is_there_and_paid_for_once(done: Finished) -> None:
    said = [record_from(row) for row in read_rows(done.path / "votes.jsonl")]
    verdicts = [v for v in said if isinstance(v, PanelVerdict)]
    assert verdicts
    assert "pair" in {v.reason for v in verdicts}
    spent = sum(vote.nanodollars for v in verdicts for vote in v.votes)
    assert 0 < spent <= 2.0 * NANO
    ledger = (done.path / "teachers.jsonl").read_text()
    assert len(ledger.splitlines()) >= 2 * sum(len(v.votes) for v in verdicts) - 2
    assert "FORGE_LOCAL_PROVIDER_KEY" not in ledger


def test_results_and_the_report_are_written(done: Finished) -> None:
    results = json.loads((done.path / "results.json").read_text())
    assert set(results["arms"]) == {"none", "document", "untrained", "on_policy"}
    assert results["arms"]["document"]["accuracy"] >= results["arms"]["none"]["accuracy"]
    assert results["policy"]["stale_tokens"] == 0
    report = (done.path / "report.html").read_text()
    for section in ("Rewards", "Channels", "Teachers&#39; votes", "Monitors"):
        assert f"<h2>{section}</h2>" in report


def test_what_was_spent_is_told_with_each_step(done: Finished) -> None:
    told = [e["teachers"] for e in read_rows(done.path / "events.jsonl") if e["event"] == "step"]
    assert len(told) == STEPS
    assert told[-1]["calls"]["open"]["answered"] > 0
    spent = [sum(step["dollars"].values()) for step in told]
    assert spent == sorted(spent)
    assert 0 < spent[-1] <= 2.0


pytestmark = [pytest.mark.timeout(900)]  # a busy machine starts it slowly

BROKEN = """\
class Broken:
    def reset(self, seed):
        return "say something."

    def step(self, text):
        raise ValueError("too late")
"""


def written(module: str, out: Path) -> None:
    """Run an example's own script."""
    subprocess.run(
        [sys.executable, "-m", f"examples.{module}", "--out", str(out)],
        check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
    )  # fmt: skip


def test_the_parquet_example_records_both_rewards(tmp_path: Path) -> None:
    mesh = copied("parquet_two_rewards", tmp_path / "example")
    written("parquet_two_rewards.problems", mesh.parent / "problems.parquet")
    process = run_to_end(by_clerk(mesh, tmp_path))
    assert process.returncode == 0, process.stdout + process.stderr
    run = (tmp_path / "parquet_two_rewards" / "latest").resolve()
    for episode in read_rows(run / "episodes.jsonl"):
        given = {name: outcome["value"] for name, outcome in episode["rewards"].items()}
        words = len(episode["turns"][0]["text"].split())
        assert given["brief"] == (1.0 if words <= 4 else 4 / words)
        assert episode["reward"] == pytest.approx(given["correct"] + 0.5 * given["brief"])
    (metrics,) = read_rows(run / "metrics.jsonl")
    assert {"reward", "reward/correct", "reward/brief"} <= metrics["episodes"].keys()
    arm = json.loads((run / "results.json").read_text())["arms"]["on_policy"]
    low, high = arm["reward_ci95"]
    assert low <= arm["reward"] <= high


def test_a_run_whose_episodes_all_fail_says_so_once(tmp_path: Path) -> None:
    mesh = copied("code_fixing", tmp_path / "example")
    (mesh.parent / "mine.py").write_text(BROKEN)
    broken = {"kind": "python", "factory": "mine:Broken", "folder": str(mesh.parent)}
    sets = {"episodes.environment": broken, "train.steps": 2}
    process = run_to_end(by_clerk(mesh, tmp_path, **sets))
    assert process.returncode == 0, process.stdout + process.stderr
    told = (
        "step 1: none of 8 episodes has a reward; 8 of them: environment_refused: "
        "ValueError: too late (mine.py:6); forge env check MESH plays a few"
    )
    run = (tmp_path / "code_fixing" / "latest").resolve()
    warned = [e["message"] for e in read_rows(run / "events.jsonl") if e["event"] == "warned"]
    assert [w for w in warned if w.startswith("step")] == [told]
    assert process.stdout.count(f"warning: {told}") == 1


def test_a_run_trains_every_candidate_of_every_run_and_reports_its_populations(calm: Path) -> None:
    rows = read_rows(calm / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    for row in rows:
        told = row["episodes"]
        assert (told["count"], told["errored"], told["rsa/runs"]) == (4 * CANDIDATES, 0, 4)
        assert all(0 <= told[f"rsa/accuracy_{t}"] <= 1 for t in range(4))
        assert row["channels"]["grpo"]["count"] == row["tokens"]
        assert row["kl"] is None
    assert any(row["tokens"] for row in rows)  # where rewards varied within a problem
    episodes = [from_row(row) for row in read_rows(calm / "episodes.jsonl")]
    assert len(episodes) == 4 * 4 * CANDIDATES
    for step, part in enumerate([episodes[i : i + 64] for i in range(0, 256, 64)]):
        assert {v for e in part for t in e.turns for v in t.versions} == {step}  # on policy
        assert len({e.group for e in part}) == 2
    results = json.loads((calm / "results.json").read_text())
    before, after = (results["arms"][arm]["populations"] for arm in ("untrained", "on_policy"))
    gain = results["aggregation"]
    assert gain["last"] == after["accuracy"][-1] - before["accuracy"][-1]
    assert gain["first"] == after["accuracy"][0] - before["accuracy"][0]
    assert gain["aggregation"] == gain["last"] - gain["first"]
    report = (calm / "report.html").read_text()
    assert "<h2>Aggregation</h2>" in report
    assert "Training moved the last population by" in report
