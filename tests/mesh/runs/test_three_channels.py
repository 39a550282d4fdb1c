"""meshes/three_channels.yaml from the command line, cut down to a few steps."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from channel_runs import (
    GROUP,
    STEPS,
    TASKS,
    whole_run,
)
from small_run import Finished

from cartridge_forge.plugins.episodes.environments.episode_files import from_row
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective
from cartridge_forge.plugins.replay.vote_records import from_row as record_from
from cartridge_forge.protocols.files import read_rows
from cartridge_forge.protocols.teacher_replay import NANO, PanelVerdict

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
