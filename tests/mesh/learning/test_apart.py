"""Test cartridges trained apart, and over several ranks."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, changed, of_cartridge, prefixes, scene
from rank_jobs import JOBS, STEPS, held_bytes
from safetensors.torch import load_file
from twins import Twin

from cartridge_forge.learning.checkpoint import LastState, list_checkpoints, read_checkpoint
from cartridge_forge.learning.decoder import LanguageModel
from cartridge_forge.learning.model.loading import load_model
from cartridge_forge.learning.ranks import ALONE, ProcessGroup, join
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, GrpoSpec, SdpoSpec
from cartridge_forge.plugins.host.ranks import divide_base
from cartridge_forge.plugins.replay.spec import DpoSpec
from cartridge_forge.plugins.watch.score_text import decoded
from cartridge_forge.protocols.errors import DataError, PublishError, RunError
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from twins import Twin

APART_STEPS = 5


def trainer_of(
    twin: Twin, names: str, objective: EpisodesObjective, last: Path | None = None, **train: Any
) -> CartridgeTrainer:
    spec = TrainSpec(**{"steps": APART_STEPS, "lr": 0.02, "row_tokens": 24, "clip": 0.05, **train})
    return CartridgeTrainer(twin.model, bank_of(twin, names), spec, last, objective=objective)


@pytest.fixture(scope="module")
def lessons(llama: Twin) -> list[TrainBatch]:
    """Five steps: of both cartridges, and the second and the fourth of a alone."""
    whole = [scene(llama, bank_of(llama), v, v) for v in range(APART_STEPS)]
    whole = [replace(b, scores={k: v for k, v in b.scores.items() if k != "ref"}) for b in whole]
    return [of_cartridge(b, "a") if v in (1, 3) else b for v, b in enumerate(whole)]


def state_of(trainer: CartridgeTrainer, name: str) -> dict[str, Tensor]:
    return {
        key: tensor.detach().clone()
        for key, tensor in trainer._state.checkpoint({}).cartridge(name).items()
    }


FORMS: dict[str, tuple[EpisodesObjective, dict[str, Any]]] = {
    "doc_kl": (EpisodesObjective(), {}),
    "all": (ALL, {}),
    "as weighted": (changed(ALL, balance="none"), {}),
    "norms every second step": (changed(ALL, balance_every=2), {}),
    "minibatches": (ALL, {"minibatches": 2, "updates_per_rollout": 2}),
    "kto": (changed(ALL, dpo=DpoSpec(variant="kto")), {}),
    "rewards of the whole rollout": (
        changed(ALL, grpo=GrpoSpec(baseline="reinforce_pp", zero_variance="keep")), {},
    ),
    "reference": (changed(ALL, grpo=GrpoSpec(kl=0.1, kl_reference="version", kl_refresh=2)), {}),
    "hinted": (changed(ALL, sdpo=SdpoSpec(teacher="ema", ema_decay=0.75)), {}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_two_together_become_what_each_becomes_alone(
    llama: Twin, lessons: list[TrainBatch], form: str
) -> None:
    """To the bit where every forward is the same (here: of one sample), numbers, moments and norms;
    each has its own steps of the schedule, so b's second step is the run's third."""
    objective, train = FORMS[form]
    objective = changed(objective, micro_tokens=1)
    both = trainer_of(llama, "ab", objective, **train)
    alone = {name: trainer_of(llama, name, objective, **train) for name in "ab"}
    planned = {"b": 3}
    for trainer in (both, *alone.values()):
        trainer.begin("on_policy", APART_STEPS, planned)
    for v, batch in enumerate(lessons):
        before = state_of(both, "b")
        found = both.step(batch, v)
        for name, trainer in alone.items():
            own = trainer.step(of_cartridge(batch, name), v)
            assert own.cartridges.get(name) == found.cartridges.get(name)
            expected = state_of(trainer, name)
            assert state_of(both, name).keys() == expected.keys()
            for key, tensor in state_of(both, name).items():
                assert torch.equal(tensor, expected[key]), (v, name, key)
        assert list(found.cartridges) == (["a"] if v in (1, 3) else ["a", "b"])
        if v in (1, 3):
            assert all(torch.equal(t, before[key]) for key, t in state_of(both, "b").items())
    assert [both._state.progress[name].steps for name in "ab"] == [5, 3]
    assert found.cartridges["b"]["step"] == 3


@pytest.mark.parametrize("form", ["doc_kl", "as weighted", "kto"])
def test_in_one_forward_they_are_equal_but_for_rounding(
    llama: Twin, lessons: list[TrainBatch], form: str
) -> None:
    objective, _ = FORMS[form]
    both = trainer_of(llama, "ab", objective)
    alone = {name: trainer_of(llama, name, objective) for name in "ab"}
    for trainer in (both, *alone.values()):
        trainer.begin("on_policy", APART_STEPS)
    batch = lessons[0]
    both.step(batch, 0)
    for name, trainer in alone.items():
        trainer.step(of_cartridge(batch, name), 0)
        theirs, ours = (t._state.progress[name].moments["exp_avg"] for t in (trainer, both))
        scale = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * scale)


def test_a_rare_cartridge_s_rate_falls_over_its_own_steps(
    llama: Twin, lessons: list[TrainBatch]
) -> None:
    trainer = trainer_of(llama, "ab", EpisodesObjective(), warmup_steps=0)
    trainer.begin("on_policy", APART_STEPS, {"b": 3})
    rates = [dict(trainer.step(batch, v).cartridges) for v, batch in enumerate(lessons)]
    # From 1 to .1 along a cosine, at 0, 1/3 and 2/3 of the way.
    assert [r["b"]["lr"] for r in rates if "b" in r] == pytest.approx([0.02, 0.0155, 0.0065])
    assert len([r["a"]["lr"] for r in rates]) == 5
    assert rates[4]["a"]["lr"] == pytest.approx(0.02 * (0.1 + 0.45 * (1 + -0.809017)), rel=1e-5)


def test_a_snapshot_shares_what_did_not_change(llama: Twin, lessons: list[TrainBatch]) -> None:
    objective = changed(EpisodesObjective(), alpha=0.5, sdpo=SdpoSpec(teacher="ema"))
    trainer = trainer_of(llama, "ab", objective, staleness=2)
    trainer.begin("on_policy", APART_STEPS)
    taken = [trainer.snapshot(0)]
    for v, batch in enumerate(lessons[:3]):
        trainer.step(batch, v)
        taken.append(trainer.snapshot(v + 1))
    assert [dict(s.since) for s in taken] == [
        {"a": 0, "b": 0}, {"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 3, "b": 3},
    ]  # fmt: skip
    assert taken[2].kv["b"] is taken[1].kv["b"]
    assert taken[2].hinted is not None
    assert taken[1].hinted is not None
    assert taken[2].hinted["b"] is taken[1].hinted["b"]
    assert taken[2].kv["a"] is not taken[1].kv["a"]
    assert torch.equal(taken[3].kv["b"], prefixes(trainer.bank)["b"])
    # Another arm starts from the untrained cartridges, as another version.
    trainer.begin("offline", APART_STEPS)
    assert dict(trainer.snapshot(4).since) == {"a": 4, "b": 4}
    trainer.step(replace(of_cartridge(scene(llama, bank_of(llama), 4, 4), "a")), 4)
    trainer.begin("again", APART_STEPS)
    assert dict(trainer.snapshot(6).since) == {"a": 6, "b": 4}, "b was never trained"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_successor_publishes_the_same_and_shares_the_same(
    llama: Twin, lessons: list[TrainBatch], tmp_path: Path, staleness: int
) -> None:
    objective = changed(ALL, sdpo=SdpoSpec(teacher="ema"))
    lost = trainer_of(llama, "ab", objective, tmp_path / "last", staleness=staleness)
    lost.begin("on_policy", APART_STEPS)
    lost.snapshot(0)
    for v, batch in enumerate(lessons[:4]):
        lost.step(batch, v)
        if v < 3:
            lost.snapshot(v + 1)
    successor = trainer_of(llama, "ab", objective, tmp_path / "last", staleness=staleness)
    assert successor.recover() == 4
    for version in range(4 - staleness, 5):
        ours, theirs = successor.snapshot(version), lost.snapshot(version)
        assert ours.since == theirs.since
        assert ours.hinted is not None
        assert theirs.hinted is not None
        for name in "ab":
            assert torch.equal(ours.kv[name], theirs.kv[name])
            assert torch.equal(ours.hinted[name], theirs.hinted[name])
    with pytest.raises(PublishError, match=f"version {3 - staleness} cannot be published"):
        successor.snapshot(3 - staleness)
    if staleness:
        assert successor.snapshot(4).kv["b"] is successor.snapshot(3).kv["b"]
    both = [t.step(lessons[4], 4) for t in (lost, successor)]
    assert both[0] == both[1]


def test_a_checkpoint_links_what_a_step_left_alone(
    llama: Twin, lessons: list[TrainBatch], tmp_path: Path
) -> None:
    trainer = trainer_of(llama, "ab", ALL)
    trainer.begin("on_policy", APART_STEPS, {"b": 3})
    for v, batch in enumerate(lessons[:2]):
        trainer.step(batch, v)
        trainer.save(tmp_path, {}, v + 1)
    first, second = list_checkpoints(tmp_path)
    names = [sorted(p.name for p in path.glob("cartridge-*")) for path in (first, second)]
    assert names[0][0] == "cartridge-0000-000001.safetensors"
    assert names[1][0] == "cartridge-0000-000002.safetensors"
    assert names[0][1] == names[1][1] == "cartridge-0001-000001.safetensors"
    assert (first / names[0][1]).stat().st_ino == (second / names[0][1]).stat().st_ino
    resumed = trainer_of(llama, "ab", ALL)
    resumed.restore(read_checkpoint(second))
    for v, batch in enumerate(lessons[2:], start=2):
        assert resumed.step(batch, v) == trainer.step(batch, v)
    (tmp_path / "further").mkdir()
    resumed.save(tmp_path / "further", {}, APART_STEPS)
    for name in "ab":
        for key, tensor in state_of(trainer, name).items():
            assert torch.equal(state_of(resumed, name)[key], tensor)


def test_a_checkpoint_of_all_cartridges_together_goes_on(
    llama: Twin, lessons: list[TrainBatch], tmp_path: Path
) -> None:
    """Of schema 2: one count of steps and one schedule for all of them."""
    trainer = trainer_of(llama, "a", ALL)
    trainer.begin("on_policy", APART_STEPS)
    batches = [of_cartridge(batch, "a") for batch in lessons]
    trainer.step(batches[0], 0)
    new = read_checkpoint(trainer.save(tmp_path, {"step": 1}, 1))
    own = new.facts["cartridges"]["a"]
    facts = {k: v for k, v in new.facts.items() if k not in ("cartridges", "published")}
    facts |= {key: own[key] for key in ("steps", "warmup_steps", "balance")}
    stacked = {k: v if k == "adam.step" else v[None] for k, v in new.cartridge("a").items()}
    old = write_stacked(tmp_path / "old/version-000001", facts, stacked)
    resumed = trainer_of(llama, "a", ALL)
    assert resumed.restore(read_checkpoint(old)) == {"step": 1}
    assert resumed.step(batches[1], 1) == trainer.step(batches[1], 1)


def write_stacked(path: Path, facts: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint as versions before the third schema did."""
    from safetensors.torch import save_file

    path.mkdir(parents=True)
    save_file(tensors, path / "state.safetensors")
    digest = hashlib.sha256((path / "state.safetensors").read_bytes()).hexdigest()
    told = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    manifest = {"schema": 2, "sha256": digest, "facts": facts, "facts_sha256": told}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_the_output_is_json(llama: Twin, lessons: list[TrainBatch]) -> None:
    trainer = trainer_of(llama, "ab", ALL)
    trainer.begin("on_policy", APART_STEPS)
    told = asdict(trainer.step(lessons[0], 0))
    assert json.loads(json.dumps(told["cartridges"])) == told["cartridges"]
    assert {name: own["tokens"] for name, own in told["cartridges"].items()} == {"a": 25, "b": 19}


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
