"""Ranks: several processes train what one trains, and no failure of one leaves another waiting."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_jobs import JOBS, STEPS, held_bytes
from safetensors.torch import load_file
from twins import Twin

from cartridge_forge.learning.checkpoint import LastState, read_checkpoint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.model.parallel import divide_base
from cartridge_forge.learning.ranks import ALONE, ProcessGroup, join
from cartridge_forge.protocols.errors import DataError, RunError
from cartridge_forge.protocols.records.answers import decoded

Told = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all jobs, run once, wrote what they did."""
    out = tmp_path_factory.mktemp("ranks")
    subprocess.run([sys.executable, "-m", "rank_jobs", str(out), *JOBS], check=True, timeout=240)
    # Rank 1 dies in the last job, on purpose.
    assert json.loads((out / "codes.json").read_text()) == [0, 3, 0, 0]
    return out


@pytest.fixture(scope="module")
def told(out: Path) -> Told:
    """What every rank of every job told, by job and rank."""
    return {
        job: [json.loads(p.read_text()) for p in sorted(out.glob(f"{job}.[0-9].json"))]
        for job in JOBS
    }


def assert_same_curve(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Every number of every step's result, but for the last bits of float32."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("kl", "grad_norm", "lr", "tokens", "stale_tokens"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5), name
        assert ours["terms"].keys() == theirs["terms"].keys()
        for channel, term in theirs["terms"].items():
            assert ours["terms"][channel] == pytest.approx(term, rel=1e-4, abs=1e-5), channel
        assert ours["cosines"] == pytest.approx(theirs["cosines"], abs=1e-4)


@pytest.mark.parametrize("job", ["two", "three", "grid"])
def test_ranks_tell_every_token_s_score(told: Told, job: str) -> None:
    (alone,) = told["one"]
    assert sum(len(result["token_scores"]) for result in alone["results"]) > STEPS
    for ours, theirs in zip(told[job][0]["results"], alone["results"], strict=True):
        assert ours["token_scores"].keys() == theirs["token_scores"].keys()
        for id, of in theirs["token_scores"].items():
            # Rounding may move a value to the next byte, which is 6% away.
            mine = ours["token_scores"][id]
            assert decoded(mine["kl"]) == pytest.approx(decoded(of["kl"]), rel=0.07)
            assert len(mine["top"]) == len(of["top"]) > 0


@pytest.mark.parametrize("job", ["two", "three", "sharded"])
def test_ranks_train_what_one_trains(told: Told, out: Path, job: str) -> None:
    """All four channels with their facts, gradient norms and cosines; steps of which most ranks,
    or all, get nothing."""
    (alone,) = told["one"]
    assert [r["tokens"] for r in alone["results"]] == [44, 8, 8, 0, 44, 44]
    assert len(alone["results"][0]["cosines"]) == 6
    assert_same_curve(told[job][0]["results"], alone["results"])
    ours, theirs = (load_file(out / f"{j}.safetensors")["trainable"] for j in (job, "one"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_ranks_make_the_updates_that_one_makes(told: Told, out: Path) -> None:
    """Four updates a step, with the log-probabilities before the first of them."""
    (alone,) = told["several"]
    for step in (0, 4, 5):
        assert alone["results"][step]["terms"]["grpo"]["updates"] == 4
        assert alone["results"][step]["terms"]["grpo"]["approx_kl_last"] > 0
    assert_same_curve(told["several_two"][0]["results"], alone["results"])
    ours, theirs = (
        load_file(out / f"{j}.safetensors")["trainable"] for j in ("several_two", "several")
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "job", ["two", "three", "sharded", "several_two", "divided", "grid", "rest", "nan"]
)
def test_every_rank_holds_the_same_bits_and_tells_the_same(told: Told, job: str) -> None:
    first, *others = told[job]
    assert len(others) == JOBS[job][0] - 1
    for other in others:
        assert other["bits"] == first["bits"]
        assert other["results"] == first["results"]


def test_a_checkpoint_moves_between_numbers_of_ranks(told: Told, out: Path) -> None:
    """Two steps of two ranks, two of one, two of three: the curve of one all along."""
    found = [r for job in ("half", "more", "rest") for r in told[job][0]["results"]]
    assert len(found) == STEPS
    assert_same_curve(found, told["one"][0]["results"])
    manifest = json.loads((out / "half/version-000002/manifest.json").read_text())
    assert manifest["facts"]["position"] == {"by": 0}  # written by rank 0 alone


@pytest.mark.parametrize(("job", "whole"), [("apart", "one"), ("apart_several", "several")])
def test_ranks_with_cartridges_of_their_own_train_what_one_trains(
    told: Told, out: Path, job: str, whole: str
) -> None:
    """Rank 0 holds a and rank 1 holds b: all channels, facts and cosines are those of the batch."""
    (alone,) = told[whole]
    assert_same_curve(told[job][0]["results"], alone["results"])
    assert told[job][1]["results"] == told[job][0]["results"]
    expected = load_file(out / f"{whole}.safetensors")["trainable"]
    for rank, name in enumerate("ab"):
        own = load_file(out / f"{job}.{rank}.safetensors")
        assert list(own) == [name]
        torch.testing.assert_close(own[name], expected[rank], rtol=0, atol=1e-5)


def test_ranks_with_cartridges_of_their_own_answer_for_all(told: Told) -> None:
    """References of pairs over both cartridges, and how unlikely their tokens are."""
    (alone,) = told["one"]
    assert [rank["names"] for rank in told["apart"]] == [["a"], ["b"]]
    for rank in told["apart"]:
        assert len(rank["references"]) == len(alone["references"]) > 1
        for ours, theirs in zip(rank["references"], alone["references"], strict=True):
            assert (ours[0], ours[3]) == (theirs[0], theirs[3])
            assert ours[1:3] == pytest.approx(theirs[1:3], rel=1e-5)
        assert rank["deficits"] == pytest.approx(alone["deficits"], rel=1e-4)


def test_a_checkpoint_moves_between_cartridges_apart_and_together(told: Told, out: Path) -> None:
    """Two steps of two trainers apart, two of one, two of two apart again. Their checkpoint and
    last state are those of one trainer: of all cartridges, each in a file of its own."""
    parts = ("apart_half", "apart_more", "apart_rest")
    found = [r for job in parts for r in told[job][0]["results"]]
    assert_same_curve(found, told["one"][0]["results"])
    ours, theirs = (read_checkpoint(out / job / "version-000002") for job in ("apart_half", "half"))
    for name, facts in theirs.facts["cartridges"].items():
        assert ours.facts["cartridges"][name] | {"balance": 0} == facts | {"balance": 0}
    assert ours.parts.keys() == theirs.parts.keys()
    for name in "ab":
        for key, tensor in theirs.cartridge(name).items():
            torch.testing.assert_close(ours.cartridge(name)[key], tensor, rtol=1e-3, atol=1e-5)
    ours, theirs = (LastState(out / f"{job}.state").read() for job in ("apart_rest", "rest"))
    assert ours is not None
    assert theirs is not None
    assert ours.facts["version"] == STEPS
    assert ours.facts["cartridges"].keys() == theirs.facts["cartridges"].keys()
    assert ours.parts.keys() == theirs.parts.keys()


@pytest.mark.parametrize("job", ["divided", "grid"])
def test_ranks_over_a_divided_base_train_what_one_trains(told: Told, out: Path, job: str) -> None:
    """Layers divided over two ranks; and over two of four, with the copies sharded and the batch
    between them."""
    (alone,) = told["one"]
    for ours, theirs in zip(told[job][0]["results"], alone["results"], strict=True):
        assert ours["kl"] == pytest.approx(theirs["kl"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert_same_curve(told[job][0]["results"], alone["results"])
    ours, theirs = (load_file(out / f"{j}.safetensors")["trainable"] for j in (job, "one"))
    # Six updates of Adam, which divides by the gradient's size, however small.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-5)
    whole = held_bytes(load_model(str(out / "llama")))
    # The vocabulary of 97 is not divided by two: every rank has embedding and head.
    vocabulary = 2 * 97 * 64 * 4
    for rank in told[job]:
        copies = len(told[job]) // 2
        expected = ((whole - vocabulary) / 2 + vocabulary) / copies
        assert rank["held"] == pytest.approx(expected, rel=0.02)
        before, after, moved = rank["base_hashes"]
        assert before == after != moved
        assert before == told["sharded"][0]["base_hashes"][0]


def test_a_divided_base_reads_and_scores_what_the_whole_one_does(told: Told) -> None:
    """The reader, whose vocabulary is divided, and whose embedding is its projection."""
    for rank in told["divided_reader"]:
        whole, divided = rank["whole"], rank["divided"]
        assert divided["held"] == pytest.approx(whole["held"] / 2, rel=0.01)
        assert (whole["own"], divided["own"]) == ([4, 2, 2, 40, 32], [4, 2, 1, 40, 32])
        assert divided["base_hash"] == whole["base_hash"]
        assert divided["kl"] == pytest.approx(whole["kl"], rel=1e-6)
        assert divided["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
        for name in ("kv", "scores", "grad"):
            ours, theirs = torch.tensor(divided[name]), torch.tensor(whole[name])
            assert (ours - theirs).norm() < 1e-5 * theirs.norm(), name
        ours, theirs = (torch.tensor(one["matched"]) for one in (divided, whole))
        assert (ours - theirs).norm() < 1e-4 * theirs.norm()  # scores in float32


def test_what_a_base_cannot_be_divided_by_is_named(llama: Twin) -> None:
    with pytest.raises(DataError, match="4 ranks cannot stand in groups of 3"):
        join(0, 4, "file:///nowhere", tensor=3)
    ranks = ProcessGroup(0, 3, tensor=3, mesh=SimpleNamespace(get_group=lambda _: None))
    with pytest.raises(DataError, match="3 does not divide this model's 4 attention heads"):
        divide_base(llama.model, ranks)
    with pytest.raises(DataError, match="models of our own decoder"):
        divide_base(LanguageModel(), ranks)


def test_a_sharded_base_is_held_in_parts_and_is_the_same(told: Told) -> None:
    """The reader, whose embedding is its projection, and the twin, whose is not."""
    for rank in told["tied"]:
        whole, sharded = rank["whole"], rank["sharded"]
        assert sharded["held"] == pytest.approx(whole["held"] / 2, rel=0.01)
        assert sharded["kv"] == whole["kv"]  # of a document, bit for bit
        assert sharded["base_hash"] == whole["base_hash"]
        assert sharded["kl"] == pytest.approx(whole["kl"], rel=1e-6)
        assert sharded["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-5)
    for rank in told["sharded"]:
        before, after, moved = rank["base_hashes"]
        assert before == after != moved


def test_a_loss_that_is_no_number_on_one_rank_is_every_rank_s(told: Told) -> None:
    """Only one rank holds the spoilt pair. All refuse alike, and train what they are given next."""
    for rank in told["nan"]:
        assert rank["error"].startswith("RunError: replay_dpo became nan at version 0")
        assert_same_curve(rank["results"], told["one"][0]["results"][:1])


def test_ranks_whose_cartridges_differ_train_nothing(told: Told) -> None:
    for rank in told["differ"]:
        assert "RunError: trainer ranks [1] stand at other versions" in rank["error"]
        assert rank["version"] == 0


@pytest.mark.parametrize("job", ["fails", "silent", "dies"])
def test_nobody_waits_for_a_rank_that_is_gone(told: Told, job: str) -> None:
    """One that is gone is noticed at once: the timeout is ten minutes, as this test's own. One that
    is silent is waited for until a timeout of five seconds."""
    lost = [rank for rank in told[job] if "lost the others" in rank["error"]]
    assert len(lost) == 2
    for rank in lost:
        assert rank["error"].startswith("RanksLostError: trainer rank")
        assert rank["version"] == 0
    own = [rank["error"] for rank in told[job] if rank not in lost]
    said = {"fails": ["is out of memory"], "silent": ["took too long"], "dies": []}[job]
    assert own == [f"MemoryError: rank 1 {what}" for what in said]


def test_ranks_that_do_not_come_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="trainer rank 0 of 2 lost the others"):
        join(0, 2, f"file://{tmp_path}/meet", timeout_s=0.5)


def test_one_rank_needs_no_group() -> None:
    tensor = torch.ones(3)
    ALONE.add(tensor)
    ALONE.follow(tensor)
    assert join(0, 1, "env://") == ALONE
    assert ALONE.gather({"a": 1}) == [{"a": 1}]
    assert tensor.tolist() == [1, 1, 1]
