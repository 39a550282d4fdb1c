"""What a cartridge becomes does not depend on the others of its run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from channel_setup import ALL, bank_of, changed, of_cartridge, prefixes, scene

from cartridge_forge.learning.checkpoint import list_checkpoints, read_checkpoint
from cartridge_forge.learning.trainer import CartridgeTrainer
from cartridge_forge.plugins.episodes.spec.objective import EpisodesObjective, SdpoSpec
from cartridge_forge.plugins.episodes.spec.policy_gradient import GrpoSpec
from cartridge_forge.plugins.replay.spec import DpoSpec
from cartridge_forge.protocols.errors import PublishError
from cartridge_forge.protocols.spec.sections import TrainSpec
from cartridge_forge.protocols.step import TrainBatch

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor
    from twins import Twin

STEPS = 5


def trainer_of(
    twin: Twin, names: str, objective: EpisodesObjective, last: Path | None = None, **train: Any
) -> CartridgeTrainer:
    spec = TrainSpec(**{"steps": STEPS, "lr": 0.02, "row_tokens": 24, "clip": 0.05, **train})
    return CartridgeTrainer(twin.model, bank_of(twin, names), spec, last, objective=objective)


@pytest.fixture(scope="module")
def lessons(llama: Twin) -> list[TrainBatch]:
    """Five steps: of both cartridges, and the second and the fourth of a alone."""
    whole = [scene(llama, bank_of(llama), v, v) for v in range(STEPS)]
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
        trainer.begin("on_policy", STEPS, planned)
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
        trainer.begin("on_policy", STEPS)
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
    trainer.begin("on_policy", STEPS, {"b": 3})
    rates = [dict(trainer.step(batch, v).cartridges) for v, batch in enumerate(lessons)]
    # From 1 to .1 along a cosine, at 0, 1/3 and 2/3 of the way.
    assert [r["b"]["lr"] for r in rates if "b" in r] == pytest.approx([0.02, 0.0155, 0.0065])
    assert len([r["a"]["lr"] for r in rates]) == 5
    assert rates[4]["a"]["lr"] == pytest.approx(0.02 * (0.1 + 0.45 * (1 + -0.809017)), rel=1e-5)


def test_a_snapshot_shares_what_did_not_change(llama: Twin, lessons: list[TrainBatch]) -> None:
    objective = changed(EpisodesObjective(), alpha=0.5, sdpo=SdpoSpec(teacher="ema"))
    trainer = trainer_of(llama, "ab", objective, staleness=2)
    trainer.begin("on_policy", STEPS)
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
    trainer.begin("offline", STEPS)
    assert dict(trainer.snapshot(4).since) == {"a": 4, "b": 4}
    trainer.step(replace(of_cartridge(scene(llama, bank_of(llama), 4, 4), "a")), 4)
    trainer.begin("again", STEPS)
    assert dict(trainer.snapshot(6).since) == {"a": 6, "b": 4}, "b was never trained"


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_successor_publishes_the_same_and_shares_the_same(
    llama: Twin, lessons: list[TrainBatch], tmp_path: Path, staleness: int
) -> None:
    objective = changed(ALL, sdpo=SdpoSpec(teacher="ema"))
    lost = trainer_of(llama, "ab", objective, tmp_path / "last", staleness=staleness)
    lost.begin("on_policy", STEPS)
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
    trainer.begin("on_policy", STEPS, {"b": 3})
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
    resumed.save(tmp_path / "further", {}, STEPS)
    for name in "ab":
        for key, tensor in state_of(trainer, name).items():
            assert torch.equal(state_of(resumed, name)[key], tensor)


def test_a_checkpoint_of_all_cartridges_together_goes_on(
    llama: Twin, lessons: list[TrainBatch], tmp_path: Path
) -> None:
    """Of schema 2: one count of steps and one schedule for all of them."""
    trainer = trainer_of(llama, "a", ALL)
    trainer.begin("on_policy", STEPS)
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
    trainer.begin("on_policy", STEPS)
    told = asdict(trainer.step(lessons[0], 0))
    assert json.loads(json.dumps(told["cartridges"])) == told["cartridges"]
    assert {name: own["tokens"] for name, own in told["cartridges"].items()} == {"a": 25, "b": 19}
